"""AdamW with moments of one byte each, by the optional package bitsandbytes (arXiv 2110.02861)."""

import torch

from hotloop.system.files import first_line, optional


def adamw8bit(groups, lr, betas, device):
    """
    bitsandbytes' AdamW8bit of these parameter groups. Moments of 4,096 values and more are uint8, with a
    scale for each 256; smaller ones stay float32. ValueError if the package is missing or does not run here.
    """
    package = optional('bitsandbytes', 'computes optimizer=adamw8bit')

    class AdamW8bit(package.optim.AdamW8bit):
        """With found_inf set to 1 a step changes nothing."""
        found_inf = torch.zeros(())

        def step(self):
            if not self.found_inf.item():  # waits for the device, as bitsandbytes does after each parameter
                super().step()

    probe = torch.nn.Parameter(torch.ones(4096, device=device))
    probe.grad = torch.ones_like(probe)
    try:
        AdamW8bit([probe]).step()
    except Exception as e:  # it depends on the backend
        raise ValueError(f'optimizer=adamw8bit: bitsandbytes does not run on {device} '
                         f'({first_line(e)}); use --optimizer=adamw') from None
    return AdamW8bit(groups, lr, betas)
