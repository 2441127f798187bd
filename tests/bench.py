"""Performance as ratios, side by side in one run: `make bench`."""

import resource
import time

import numpy as np

import oracles
from cats import Synthetic, evaluate

EPSILONS = [round(0.05 * i, 2) for i in range(1, 20)]


def evaluation(n=25_000, layers=24, trials=25, sample=1_000):
    """`evaluate` against the paper's algorithm run input by input: that is timed on `sample` inputs and three epsilons,
    and scaled. Two sets of six methods: without search, and with `naive`, whose search the paper's Appendix C.1 does by trial."""
    table = Synthetic(layers=layers).table(n)
    small = table.take(np.arange(sample))
    scores, consistent, predictions = small.scores("meta"), small.consistent, small.predictions
    cut = sample * 4 // 5

    def slow(method, epsilon):
        taus = getattr(oracles, method)(scores[:cut], consistent[:cut], epsilon)
        exits = [oracles.predict(scores[i], taus) for i in range(cut, sample)]
        agree = np.mean([oracles.agrees(consistent[i], k) for i, k in enumerate(exits, cut)])
        right = np.mean([predictions[i, k - 1] == small.labels[i] for i, k in enumerate(exits, cut)])
        return agree, right, np.mean(exits)

    print(f"evaluate: {n:,} inputs, {layers} layers, {trials} trials, {len(EPSILONS)} epsilons")
    plain = ["static", "threshold", "independent", "shared", "shared_all", "first_exit"]
    for methods in (plain, ["static", "threshold", "naive", "independent", "shared", "first_exit"]):
        fast = min(timed(lambda: evaluate(table, methods, ["meta"], EPSILONS, trials)) for _ in range(3))
        pieces = [min(timed(lambda: slow(m, e)) for _ in range(2)) for m in methods for e in (0.05, 0.5, 0.95)]
        whole = sum(pieces) / 3 * len(EPSILONS) * trials * n / sample
        print(f"  {', '.join(methods)}")
        print(f"    evaluate {fast:.2f} s, input by input {whole:,.0f} s: {whole / fast:,.0f} times faster")
    print(f"  peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def timed(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    evaluation()
