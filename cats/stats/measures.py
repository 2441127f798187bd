"""Confidence measures: how sure an early layer is, from its logits alone (Appendix C.2; `meta`
comes from the table).

Every measure lies in [0, 1] and is higher where the layer is more confident. Calibration only reads
the order, so an entropy may be turned round and rescaled at will; in [0, 1] the baseline "score >
1-epsilon" makes sense for each.
"""

import numpy as np
from scipy.special import log_softmax

MEASURES = ("meta", "sm", "diff", "entropy", "kl", "random", "patience")
NEEDS_CLASSES = ("sm", "diff", "entropy", "kl")


def sm(logits):
    """p max, the softmax response of layer k (SM in the paper): (n, l-1)."""
    return np.exp(log_softmax(logits[:, :-1], axis=-1).max(axis=-1))


def diff(logits):
    """The difference between the two largest probabilities (Table 1)."""
    top = np.sort(np.exp(log_softmax(logits[:, :-1], axis=-1)), axis=-1)[..., -2:]
    return top[..., 1] - top[..., 0]


def entropy(logits):
    """1 - H(p_k)/log C."""
    log_p = log_softmax(logits[:, :-1], axis=-1)
    return 1 + (np.exp(log_p) * log_p).sum(axis=-1) / np.log(logits.shape[-1])


def kl(logits):
    """exp(-KL(p_{k-1} || p_k)): 1 where a layer changes nothing. Layer 1 follows no other and
    scores 0.
    """
    log_p = log_softmax(logits[:, :-1], axis=-1)
    divergence = (np.exp(log_p[:, :-1]) * (log_p[:, :-1] - log_p[:, 1:])).sum(axis=-1)  # (n, l-2)
    return np.concatenate([np.zeros((len(logits), 1)), np.exp(-np.maximum(divergence, 0))], axis=1)


def patience(agrees):
    """How many layers in a row have kept their prediction, as a share of l-1 (Zhou et al. 2020);
    agrees: (n, l-2).
    """
    streak = np.zeros((len(agrees), agrees.shape[1] + 1))
    for k in range(agrees.shape[1]):
        streak[:, k + 1] = (streak[:, k] + 1) * agrees[:, k]
    return streak / streak.shape[1]
