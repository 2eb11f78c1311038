"""Takes memory in the container that it is run in: `hog.py BYTES SECONDS`, at once where SECONDS is 0.

It holds what it took until the container ends.
"""

import os
import sys
import time

STEP = 8 * 1024 * 1024

size, seconds = int(sys.argv[1]), float(sys.argv[2])
kept = []
for _ in range(size // STEP):
    kept.append(bytearray(os.urandom(4096)) * (STEP // 4096))
    time.sleep(seconds / (size // STEP))
time.sleep(3600)
