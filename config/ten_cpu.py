# Temporal Eigenstate Networks on the source code of Python's standard library, three minutes on a CPU
#
#   python prepare.py
#   python train.py config/ten_cpu.py
#   python train.py config/ten_cpu.py --mixer=EEAE   # one of four layers attends
#
# hardware: 2 CPU cores. measured there with bf16 units, three seeds: 1.52 bits per byte in three minutes

dataset = 'stdlib'

preset = 'hybrid'
mixer = 'eigen'
x0_mix = True
n_layer = 4
n_head = 4
n_embd = 128  # 5,211,144 parameters, 4.2 million of them for pairs of tokens
block_size = 256

batch_size = 8
gradient_accumulation_steps = 1
time_budget = 3  # minutes

optimizer = 'muon'
muon_lr = 0.025
muon_momentum = 0.85
learning_rate = 8e-3
embed_lr = 0.05
weight_decay = 0.05
multi_token = 0.5
lr_schedule = 'linear'
warmup_iters = 10
min_lr = 0.0

eval_interval = 600
log_interval = 50
