import os
import time

import numpy as np

from memfeed.system.compiled import loop

time.sleep(float(os.environ.get("SLOW_LOOPS", "0")))


@loop("int64(int64[::1])")
def total(numbers):
    found = 0
    for number in numbers:
        found += number
    return found


assert total(np.arange(3)) == 3
