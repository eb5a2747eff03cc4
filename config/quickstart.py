# a small GPT on the source code of Python's standard library: no download, three minutes anywhere
#
#   python prepare.py
#   python train.py config/quickstart.py
#   python sample.py --start="def "
#
# hardware: 2 CPU cores. measured there on the full held-out split (24 files), without bf16 units:
# 1.39, 1.36, 1.33 and 1.32 bits per byte after the 424 (disturbed), 547, 634 and 750 steps that fit. with
# bf16 units not measured since the convolutions; with attention alone 1.28 after 1,758 steps

dataset = 'stdlib'  # in BPE tokens of 2.8 bytes

preset = 'modern'
n_layer = 4
n_head = 2  # of 64 channels
n_embd = 128  # 1,001,352 parameters
mixer = 'CCA'  # repeated, CCAC: all but the third are convolutions over four tokens, which learn faster
block_size = 256

batch_size = 8  # many small steps learn fastest in a short run
gradient_accumulation_steps = 1
time_budget = 3  # minutes

optimizer = 'muon'
muon_lr = 0.03
muon_momentum = 0.85  # lower than usual, because the run is short
learning_rate = 8e-3
embed_lr = 0.1
lr_schedule = 'linear'
warmup_iters = 10
min_lr = 0.0

eval_interval = 600
log_interval = 50
