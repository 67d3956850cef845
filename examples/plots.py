"""The pictures of the fine-tuning example."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, no window
import matplotlib.pyplot as plt
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import MaxNLocator
from torch import Tensor


def plot_losses(history: list[dict[str, float]], path: Path) -> None:
    steps, losses, auxiliary = zip(
        *((h["step"], h["loss"], h["auxiliary_loss"]) for h in history if "loss" in h), strict=True
    )
    held_out = [(h["step"], h["held_out_loss"]) for h in history if "held_out_loss" in h]
    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained")
    top.plot(steps, losses, color="tab:blue", alpha=0.5, label="training")
    top.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held out")
    top.set(title="Fine-tuning loss", ylabel="cross entropy per token (nats)")
    top.legend()
    bottom.plot(steps, auxiliary, color="tab:green")
    bottom.set(xlabel="step", ylabel="load-balancing loss")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_expert_load(loads: list[Tensor], path: Path) -> None:
    """Heat maps of the loads `[layers, E]` before and after: what an expert gets, over an even share of its layer's."""
    figure, panels = plt.subplots(2, sharex=True, sharey=True, figsize=(8, 6), layout="constrained")
    shares = [load / load.float().mean(dim=1, keepdim=True) for load in loads]
    limit = max(2.0, *(share.max().item() for share in shares))
    for axes, share, when in zip(panels, shares, ("before", "after"), strict=True):
        norm = TwoSlopeNorm(vmin=0, vcenter=1, vmax=limit)
        image = axes.imshow(share.tolist(), aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
        axes.set(title=f"Expert load on held-out text {when} fine-tuning", ylabel="MoE layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[1].set_xlabel("expert")
    figure.colorbar(image, ax=panels, label="tokens, relative to an even share")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_comparison(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Losses, tokens per second and peak GPU memory, where there is one, of each way to train."""
    figure, panels = plt.subplots(1, 3, figsize=(13, 4), width_ratios=(3, 2, 2), layout="constrained")
    for (way, result), style in zip(results.items(), ("-", "--", "-.", ":"), strict=True):
        panels[0].plot(range(1, len(result["losses"]) + 1), result["losses"], style, label=way)
    panels[0].set(xlabel="step", ylabel="cross entropy per token (nats)", title="Loss")
    panels[0].legend()
    speeds = [result["tokens_per_second"] for result in results.values()]
    memory = [(result["peak_bytes"] or 0) / 2**30 for result in results.values()]
    bars_of = (("tokens/s", speeds, "{:,.0f}"), ("peak GPU memory, GiB", memory, "{:.1f}"))
    for axes, (title, values, fmt) in zip(panels[1:], bars_of, strict=True):
        bars = axes.barh(list(results), values, color=[f"C{index}" for index in range(len(values))])
        axes.bar_label(bars, fmt=fmt, label_type="center")
        axes.invert_yaxis()
        axes.set(title=title)
    panels[2].set(yticks=[], visible=any(memory))
    figure.savefig(path, dpi=120)
    plt.close(figure)
