"""Would memfeed help? The verdict on a program, from measurements; and what a machine's memory and disks give."""
