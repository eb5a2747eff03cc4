# a small GPT on the source code of Python's standard library: no download, 3 to 4 minutes on a laptop
#
#   python prepare.py
#   python train.py config/quickstart.py
#   python sample.py --start="def "
#
# hardware: 2 CPU cores. measured there: about 3 minutes with bf16 units, 3 min 44 s without; 1.62 bits per
# byte on the full held-out split (24 files)

dataset = 'stdlib'  # bytes

preset = 'modern'
n_layer = 4
n_head = 4
n_embd = 128  # 852,232 parameters
block_size = 256

batch_size = 8  # many small steps learn fastest in a short run
gradient_accumulation_steps = 1
time_budget = 3  # minutes

optimizer = 'muon'
muon_lr = 0.015
muon_momentum = 0.85  # lower than usual, because the run is short
learning_rate = 2e-3
lr_schedule = 'linear'
warmup_iters = 10
min_lr = 0.0

eval_interval = 600
log_interval = 50
