"""The recipe card of a command that names none, chosen by the hardware."""

import torch

from hotloop.system.device import choose_device

# (least GB of GPU memory, card). Their data is small to download. PyTorch reports up to a tenth less memory
# than a GPU is sold with
CARDS = ((36, 'a100_fast'), (21.6, 'vram_24gb'), (14.4, 'vram_16gb'), (7.2, 'vram_8gb'), (0, 'quickstart'))
APPLE_CARD = 'shakespeare_char'
# a command that gives one of these settings describes its own model
MODEL = {'preset', 'n_layer', 'n_head', 'n_embd', 'block_size', 'optimizer'}


def needs_card(cfg, given):
    """Whether a command without a card leaves its data or its model open; a card then gives them."""
    return cfg.init_from == 'scratch' and ('dataset' not in given or MODEL.isdisjoint(given))


def card_for_machine(device):
    """(recipe card, reason) for this machine, or for the requested device."""
    if torch.cuda.is_available() and device.startswith(('auto', 'cuda')):
        memory = torch.cuda.get_device_properties(choose_device(device)[0]).total_memory / 1e9
        fits = [card for least, card in CARDS if memory >= least]
        return f'config/{fits[0]}.py', f'{memory:.0f} GB of GPU memory'
    if torch.backends.mps.is_available() and device in ('auto', 'mps'):
        return f'config/{APPLE_CARD}.py', 'Apple GPU'
    return 'config/quickstart.py', 'no GPU'
