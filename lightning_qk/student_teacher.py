"""The LightningModule of the student-teacher proxy: loss, optimizer and schedule. It knows of no format."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_qk.loss_module import LossModule
from lightning_qk.optimizers import check_settings
from lightning_qk.student import Student, Teacher


class StudentTeacher(LossModule):
    """Trains a :class:`~lightning_qk.student.Student` on what a random :class:`~lightning_qk.student.Teacher` says.

    The loss is the mean squared error over batch and width against ``teacher(x) + noise``. Batches are ``(x, noise)``,
    see :class:`lightning_qk.gaussian_data.GaussianData`. The optimizer is Adam, without weight decay; leave
    ``trainer.gradient_clip_val`` unset, as in the paper. The defaults are those of the run in its figure 4: GELU, E4M3
    everywhere diverges there, float32 does not.

    Args:
        depth: blocks of the student.
        width: d, the width of student and teacher.
        activation: ``gelu``, ``relu``, ``swiglu`` or ``linear``, of both.
        layer_norm: whether the student has LayerNorms.
        teacher_depth: layers of the teacher; None is ``depth``.
        rescaled_teacher: bring every layer of the teacher to an output of standard deviation 1; without, the output of
            a deep teacher is next to zero.
        teacher_seed: draws the teacher's weights; None has them drawn with the student's, by the seed of the run.
        lr: learning rate.
        betas: Adam's moment decays.
        eps: Adam's epsilon.
        schedule: ``constant``, or ``cosine`` down to ``min_lr`` over ``trainer.max_steps``.
        min_lr: where the cosine ends.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self,
        depth: int = 4,
        width: int = 512,
        activation: Literal["gelu", "relu", "swiglu", "linear"] = "gelu",
        layer_norm: bool = True,
        teacher_depth: int | None = None,
        rescaled_teacher: bool = False,
        teacher_seed: int | None = None,
        lr: float = 6e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        schedule: Literal["constant", "cosine"] = "constant",
        min_lr: float = 1e-4,
    ) -> None:
        super().__init__()
        check_settings("StudentTeacher", lr, betas, eps)
        if not 0 <= min_lr <= lr:
            raise ValueError(f"StudentTeacher: min_lr={min_lr} must be from 0 to lr={lr}.")
        if teacher_depth is not None and teacher_depth < 1:
            raise ValueError(f"StudentTeacher: teacher_depth={teacher_depth} must be at least 1; null is depth.")
        if schedule not in ("constant", "cosine"):
            raise ValueError(f"StudentTeacher: schedule={schedule!r} must be 'constant' or 'cosine'.")
        betas = (float(betas[0]), float(betas[1]))
        self.save_hyperparameters()
        self.student = Student(depth, width, activation, layer_norm)
        generator = None if teacher_seed is None else torch.Generator().manual_seed(teacher_seed)
        self.teacher = Teacher(teacher_depth or depth, width, activation, rescaled_teacher, generator)

    @property
    def width(self) -> int:
        """Numbers in an input, for the data module."""
        return int(self.hparams["width"])

    @override
    def forward(self, x_BD: Tensor, noise_BD: Tensor) -> Tensor:
        """The loss itself, in float32."""
        return F.mse_loss(self.student(x_BD).float(), self.teacher(x_BD) + noise_BD)

    @override
    def configure_optimizers(self) -> Any:
        h: Any = self.hparams
        optimizer = torch.optim.Adam(self.student.parameters(), h.lr, h.betas, h.eps)
        if h.schedule == "constant":
            return optimizer
        if self.trainer.max_steps <= 0:
            raise ValueError("model.schedule=cosine needs trainer.max_steps.")
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_steps, h.min_lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
