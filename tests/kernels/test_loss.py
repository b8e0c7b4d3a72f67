"""l1_ssim: value and gradient against pytorch_msssim in float64."""

from __future__ import annotations

import pytest
import torch
from pytorch_msssim import SSIM
from torch import Tensor

from splaxel_ns import cuda


def reference(
    pred: Tensor, gt: Tensor, ssim_lambda: float, exact_window: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    measure = SSIM(data_range=1.0, size_average=True, channel=3)
    if exact_window:
        x = torch.arange(11, dtype=torch.float64) - 5
        window = torch.exp(-x.square() / (2 * 1.5**2))
        measure.win = (window / window.sum()).expand(3, 1, 1, 11)
    ssim = measure(pred.permute(2, 0, 1)[None], gt.permute(2, 0, 1)[None])
    l1 = (pred - gt).abs().mean()
    return (1 - ssim_lambda) * l1 + ssim_lambda * (1 - ssim), l1, ssim


def images(kind: str, height: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(height * 1000 + width)
    noise = torch.randn(height, width, 3, generator=generator)
    if kind == "noise":
        gt = torch.rand(height, width, 3, generator=generator)
        return (gt + 0.1 * noise).clamp(0, 1), gt
    if kind == "smooth":  # nearly constant and bright: variances cancel
        x = torch.linspace(0, 0.1, width)[None, :, None]
        gt = (0.85 + x).expand(height, width, 3).contiguous()
        return gt + 0.01 * noise, gt
    gt = torch.zeros(height, width, 3)
    return gt + 0.002 * noise, gt


def compare(pred: Tensor, gt: Tensor, ssim_lambda: float, exact_window: bool = False) -> None:
    ours, theirs = pred.clone().requires_grad_(), pred.double().requires_grad_()
    results = cuda.l1_ssim(ours, gt, ssim_lambda)
    expected = reference(theirs, gt.double(), ssim_lambda, exact_window)
    for result, value in zip(results, expected, strict=True):
        assert float(result.detach()) == pytest.approx(float(value.detach()), abs=2e-6)
    (3 * results[0]).backward()
    (3 * expected[0]).backward()
    assert ours.grad is not None and theirs.grad is not None
    assert float((ours.grad.double() - theirs.grad).abs().max() / theirs.grad.abs().max()) < 1e-5


# One window; one row or column of windows; heights around the bands of 64 rows and the ten rows after them.
@pytest.mark.parametrize(
    "size", [(11, 11), (11, 40), (40, 11), (37, 53), (64, 33), (65, 20), (73, 20), (74, 20), (75, 20), (139, 47)]
)
@pytest.mark.parametrize("ssim_lambda", [0.0, 0.2, 1.0])
def test_matches_float64(size: tuple[int, int], ssim_lambda: float) -> None:
    compare(*images("noise", *size), ssim_lambda)


@pytest.mark.parametrize("width", [1024, 1025, 2060, 3300])
def test_wide_images_are_cut_into_strips(width: int) -> None:
    compare(*images("noise", 24, width), 0.2)


@pytest.mark.parametrize("kind", ["smooth", "black"])
def test_matches_float64_where_variances_vanish(kind: str) -> None:
    # pytorch_msssim rounds its window to float32 in any precision; the weights then do not sum to 1, and in flat parts
    # its variances are wrong by more than our tolerance. Compare with the window as it was meant.
    compare(*images(kind, 70, 60), 0.2, exact_window=True)


def test_equal_images() -> None:
    pred = torch.rand(30, 30, 3, requires_grad=True)
    loss, l1, ssim = cuda.l1_ssim(pred, pred.detach().clone(), 0.2)
    loss.backward()
    assert float(l1) == 0 and float(ssim) == pytest.approx(1, abs=1e-6)
    assert pred.grad is not None and float(pred.grad.abs().max()) < 1e-8


def test_without_gradient_the_value_is_the_same() -> None:
    pred, gt = images("noise", 80, 50)
    with_gradient = cuda.l1_ssim(pred.clone().requires_grad_(), gt, 0.2)
    for a, b in zip(cuda.l1_ssim(pred, gt, 0.2), with_gradient, strict=True):
        assert torch.equal(a, b.detach())
    with torch.no_grad():
        assert not cuda.l1_ssim(pred.clone().requires_grad_(), gt, 0.2)[0].requires_grad


def test_result_does_not_depend_on_threads() -> None:
    pred, gt = images("noise", 150, 40)
    threads = torch.get_num_threads()
    outcomes = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        leaf = pred.clone().requires_grad_()
        loss = cuda.l1_ssim(leaf, gt, 0.2)[0]
        loss.backward()
        assert leaf.grad is not None
        outcomes.append((loss.detach(), leaf.grad))
    torch.set_num_threads(threads)
    for loss, gradient in outcomes[1:]:
        assert torch.equal(loss, outcomes[0][0]) and torch.equal(gradient, outcomes[0][1])


@pytest.mark.parametrize(
    ("pred", "gt", "ssim_lambda", "message"),
    [
        (torch.zeros(10, 40, 3), torch.zeros(10, 40, 3), 0.2, "40x10 pixels holds no 11x11 window"),
        (torch.zeros(20, 40, 4), torch.zeros(20, 40, 4), 0.2, r"pred must be \[H, W, 3\]"),
        (torch.zeros(20, 40, 3), torch.zeros(20, 41, 3), 0.2, r"gt must have shape \[20, 40, 3\]"),
        (torch.zeros(20, 40, 3), torch.zeros(20, 40, 3, dtype=torch.uint8), 0.2, "gt must be torch.float32"),
        (torch.zeros(20, 40, 3), torch.zeros(20, 40, 3), 1.5, "ssim_lambda must lie in 0..1"),
    ],
)
def test_refuses(pred: Tensor, gt: Tensor, ssim_lambda: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cuda.l1_ssim(pred, gt, ssim_lambda)


@pytest.mark.parametrize("width", [40, 2500])
def test_shares_of_crops_add_up(width: int) -> None:
    """Two overlapping crops, each counting its part: values add up, gradients are those of the whole image's loss."""
    height, border = 48, 10
    pred, gt = images("noise", height, width)
    whole = pred.clone().requires_grad_()
    expected = cuda.l1_ssim(whole, gt, 0.2)
    expected[0].backward()
    total = torch.zeros(3)
    for counted, crop in ((slice(0, 20), slice(0, 30)), (slice(20, 48), slice(10, 48))):  # rows, with ten around
        pixels, windows = torch.zeros(height, width), torch.zeros(height, width)
        pixels[counted] = windows[counted] = 1.0  # a window counts where its centre is
        share = cuda.LossShare(pixels[crop].contiguous(), windows[crop][5:-5, 5:-5].contiguous(), height, width)
        part = pred[crop].clone().requires_grad_()
        results = cuda.l1_ssim(part, gt[crop].contiguous(), 0.2, share)
        results[0].backward()
        total += torch.stack([value.detach() for value in results])
        assert part.grad is not None and whole.grad is not None
        own = slice(counted.start - crop.start, counted.stop - crop.start)
        assert torch.allclose(part.grad[own], whole.grad[counted], atol=1e-9, rtol=1e-5)
    assert crop.start + border == 20
    for value, sum_of_shares in zip(expected, total, strict=True):
        assert float(sum_of_shares) == pytest.approx(float(value.detach()), abs=1e-6)
