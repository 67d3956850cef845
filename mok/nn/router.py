"""The router: one pipeline that covers the formulas of transformers' routers.

logits  = W x
scores  = score_function(logits)                     softmax over the experts, sigmoid, or sqrt(softplus)
choice  = scores + e_score_correction_bias, -inf outside the best groups
ids     = the top_k highest of choice; on a tie the lowest id first
weights = scores[ids] / max(sum + renormalize_eps, renormalize_min) * scaling_factor
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mok._checks import check_int, check_tensor
from mok.comm import as_communicator

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["top2_sum", "max"]

_SCORE_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}


class RouterOutput(NamedTuple):
    """What a router returns, in the order of transformers' routers.

    router_logits [T, E]: before the score function.
    router_weights [T, K]: float32 (float64 if x is); zero for masked tokens.
    top_experts [T, K]: int64, best first; -1 for masked tokens.
    """

    router_logits: Tensor
    router_weights: Tensor
    top_experts: Tensor


class MoKRouter(nn.Module):
    """Chooses `top_k` of `num_experts` experts for each token, and their weights.

    Parameter `weight [E, H]`; with `use_correction_bias` the buffer `e_score_correction_bias [E]`, which counts for the
    choice only and is moved by `update_bias`, not by gradients. It stays float32 in `.to(dtype)`, because the steps of
    `update_bias` are too small for less.

    score_function: "softmax", "sigmoid" or "sqrtsoftplus" (DeepSeek-V4); computed in float32.
    score_after_top_k: choose by the logits, then apply the score function to the chosen ones only (Granite, gpt-oss).
    num_groups, top_k_groups: experts lie in `num_groups` equal groups; only those of the best `top_k_groups` can be
        chosen. group_score: what ranks a group: the sum of its two best (DeepSeek-V3) or its best (DeepSeek-V2).
    renormalize: divide the chosen scores by `max(sum + renormalize_eps, renormalize_min)` (Ernie has the max).
    scaling_factor: multiplies the weights.
    logits_dtype: the logits are computed at least in this dtype, also under autocast; None: in the dtype of x and
        under autocast, as transformers' Mixtral and Qwen do.

    Which options make which family (`mok` never rounds the weights to the dtype of x, as some families do):

        Mixtral, Qwen3 (norm_topk_prob)   logits_dtype=None
        Qwen2, OLMoE                      logits_dtype=None, renormalize=False
        DeepSeek-V2                       renormalize=False, num_groups, top_k_groups, group_score="max", scaling_factor
        DeepSeek-V3, GLM-4.5, Kimi-K2     score_function="sigmoid", use_correction_bias=True, num_groups, top_k_groups,
                                          renormalize_eps=1e-20, scaling_factor
        MiniMax-M2                        score_function="sigmoid", use_correction_bias=True, logits_dtype=None
        Mistral-4                         num_groups, top_k_groups, renormalize_eps=1e-20, logits_dtype=None
        Ernie-4.5                         use_correction_bias=True, renormalize_min=moe_norm_min
        LFM2                              score_function="sigmoid", use_correction_bias=True, renormalize_eps=1e-6,
                                          scaling_factor, logits_dtype=None
        DeepSeek-V4                       score_function="sqrtsoftplus", use_correction_bias=True,
                                          renormalize_eps=1e-20, scaling_factor, logits_dtype=None
        Granite                           score_after_top_k=True, renormalize=False, logits_dtype=None

    Raises TypeError or ValueError that names the argument.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: ScoreFunction = "softmax",
        score_after_top_k: bool = False,
        use_correction_bias: bool = False,
        num_groups: int = 1,
        top_k_groups: int = 1,
        group_score: GroupScore = "top2_sum",
        renormalize: bool = True,
        renormalize_eps: float = 0.0,
        renormalize_min: float = 0.0,
        scaling_factor: float = 1.0,
        logits_dtype: torch.dtype | None = torch.float32,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = check_int("hidden_size", hidden_size, 1)
        self.num_experts = check_int("num_experts", num_experts, 1)
        self.top_k = check_int("top_k", top_k, 1)
        self.score_function = score_function
        self.score_after_top_k = score_after_top_k
        self.num_groups = check_int("num_groups", num_groups, 1)
        self.top_k_groups = check_int("top_k_groups", top_k_groups, 1)
        self.group_score = group_score
        self.renormalize = renormalize
        self.renormalize_eps = renormalize_eps
        self.renormalize_min = renormalize_min
        self.scaling_factor = scaling_factor
        self.logits_dtype = logits_dtype
        self._check_options()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32) if use_correction_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.reset_parameters()

    def _check_options(self) -> None:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k: expected at most num_experts = {self.num_experts}, got {self.top_k}")
        if self.score_function not in _SCORE_FUNCTIONS:
            raise ValueError(f"score_function: expected one of {tuple(_SCORE_FUNCTIONS)}, got {self.score_function!r}")
        if self.group_score not in get_args(GroupScore):
            raise ValueError(f"group_score: expected one of {get_args(GroupScore)}, got {self.group_score!r}")
        group_size, rest = divmod(self.num_experts, self.num_groups)
        if rest or (self.num_groups > 1 and self.group_score == "top2_sum" and group_size < 2):
            raise ValueError(
                f"num_groups: expected a divisor of num_experts = {self.num_experts} (and groups of two at least, "
                f"to sum their two best), got {self.num_groups}"
            )
        if self.top_k_groups > self.num_groups or self.top_k > self.top_k_groups * group_size:
            raise ValueError(
                f"top_k_groups: expected at most num_groups = {self.num_groups} and enough groups of {group_size} for "
                f"top_k = {self.top_k}, got {self.top_k_groups}"
            )

    def reset_parameters(self) -> None:
        """As `nn.Linear`: uniform within 1/sqrt(H). The correction bias becomes zero."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.e_score_correction_bias is not None:
            nn.init.zeros_(self.e_score_correction_bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoKRouter:
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if bias is not None and moved is not None and moved.dtype != bias.dtype:
            self.e_score_correction_bias = bias.to(moved.device)
        return self

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, *, replay: Callable[[Tensor], Tensor] | None = None
    ) -> RouterOutput:
        """Route `x [T, H]`.

        padding_mask: bool `[T]`, True for real tokens; the others get ids -1 and weights 0.
        replay: from the ids chosen here, the ids to use instead (`mok.nn.replay`); the weights follow them.
        """
        check_tensor("x", x, ("T", self.hidden_size), (torch.float32, torch.bfloat16, torch.float16, torch.float64))
        logits = self._logits(x)
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = values if self.score_after_top_k else _SCORE_FUNCTIONS[self.score_function](values)
        top_experts = self.choose(scores)
        if padding_mask is not None:
            check_tensor("padding_mask", padding_mask, (x.shape[0],), torch.bool, x.device)
            top_experts = top_experts.masked_fill(~padding_mask[:, None], -1)
        if replay is not None:
            top_experts = replay(top_experts)
        return RouterOutput(logits, self._weights(scores, top_experts), top_experts)

    def _logits(self, x: Tensor) -> Tensor:
        if self.logits_dtype is None:
            return F.linear(x, self.weight)
        dtype = torch.promote_types(self.logits_dtype, x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype))

    @torch.no_grad()
    def choose(self, scores: Tensor) -> Tensor:
        """The ids `[T, K]` of the best scores `[T, E]`, after bias and groups."""
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.num_groups > 1:
            in_groups = scores.unflatten(-1, (self.num_groups, -1))
            group_scores = in_groups.amax(-1) if self.group_score == "max" else in_groups.topk(2).values.sum(-1)
            best = torch.zeros_like(group_scores, dtype=torch.bool).scatter(
                1, top_k(group_scores, self.top_k_groups), 1
            )
            scores = in_groups.masked_fill(~best[..., None], -math.inf).flatten(1)
        return top_k(scores, self.top_k)

    def _weights(self, scores: Tensor, top_experts: Tensor) -> Tensor:
        weights = scores.gather(1, top_experts.clamp(min=0))
        if self.score_after_top_k:
            weights = _SCORE_FUNCTIONS[self.score_function](weights)
        if self.renormalize:
            total = weights.sum(-1, keepdim=True)
            if self.renormalize_eps:
                total = total + self.renormalize_eps
            if self.renormalize_min:
                total = total.clamp(min=self.renormalize_min)
            weights = weights / total
        if self.scaling_factor != 1.0:
            weights = weights * self.scaling_factor
        return weights.masked_fill(top_experts < 0, 0.0)

    @torch.no_grad()
    def update_bias(self, tokens_per_expert: Tensor, rate: float, process_group: Any = None) -> None:
        """Loss-free balancing: raise the bias of experts with less than the mean load by `rate`, lower the others'
        (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; arXiv 2408.15664).

        tokens_per_expert: `[E]`, this rank's sum over the layer's calls since the last update (`tokens_per_expert()`).
        process_group: the ranks whose tokens count; it sums over them, so that all move the bias alike.
        """
        if self.e_score_correction_bias is None:
            raise ValueError("use_correction_bias: expected True for update_bias, got False")
        check_tensor("tokens_per_expert", tokens_per_expert, (self.num_experts,), (torch.int64, torch.int32))
        load = as_communicator(process_group).all_reduce_sum(tokens_per_expert)
        # Times E, to compare with the mean in whole numbers.
        below = (load.sum() - load * self.num_experts).sign()
        self.e_score_correction_bias.add_(below.to(self.e_score_correction_bias), alpha=rate)

    def extra_repr(self) -> str:
        parts = [f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}"]
        parts.append(f"score_function={self.score_function!r}, renormalize={self.renormalize}")
        if self.num_groups > 1:
            parts.append(f"num_groups={self.num_groups}, top_k_groups={self.top_k_groups}")
        if self.scaling_factor != 1.0:
            parts.append(f"scaling_factor={self.scaling_factor}")
        return ", ".join(parts)


def top_k(scores: Tensor, k: int) -> Tensor:
    """The ids `[T, k]` of the k highest of `scores [T, n]`, best first, equal ones by ascending id.

    torch.topk leaves open which of several equal scores it picks, so two passes over the same scores may differ. Here
    every key is different: the bits of the score, mapped to an integer of the same order, above the inverted id. That
    costs no more than topk itself; a stable sort took 7 times as long on a CPU (T 2048, n 128).
    """
    if scores.dtype != torch.float32:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 turns -0.0, which equals 0.0, into it
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = scores.shape[-1] - 1
    ids = torch.arange(last, -1, -1, device=scores.device)
    keys = (ordered.long() << 32) | ids
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
