"""Saves over and over in child processes that are killed; prints how often the file was whole. A script, so that it forks alone."""

import os
import random
import signal
import sys
import time

import numpy as np

import optimisers as op


def main(file: str, times: int) -> int:
    model = {"a": np.zeros(200_000), "b": np.zeros(100_000)}
    state = op.setup(op.Adam(), model)
    op.save(file, state, model)
    rng = random.Random(0)
    killed = 0
    for _ in range(times):
        child = os.fork()
        if not child:
            for at in range(10_000):
                values = {name: np.full(each.shape, float(at)) for name, each in model.items()}
                op.save(file, state.evolved(step=at), values)
            os._exit(0)
        time.sleep(rng.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1
        found, values, *_ = op.load(file)
        assert found is not None
        for each in values.values():
            assert (each == found.step).all()
    sys.stdout.write(f"{killed} times killed, {killed} times whole\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
