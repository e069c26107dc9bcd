"""The loop over decoded pixels that numba compiles; `memfeed.system.compiled` says when this module is imported."""

from memfeed.system.compiled import loop


@loop("void(uint8[::1], uint8[:, ::1])")
def write_planes(pixels, planes):
    """Write pixels of three bytes each to three planes, [3, pixels]."""
    one, two, three = planes[0], planes[1], planes[2]
    for at in range(planes.shape[1]):
        one[at], two[at], three[at] = pixels[3 * at], pixels[3 * at + 1], pixels[3 * at + 2]
