# characters of Shakespeare on a CPU: the loss of nanoGPT's CPU run in a fraction of its time
#
#   python prepare.py shakespeare_char
#   python train.py config/shakespeare_cpu.py
#   python sample.py --start="ROMEO:"
#
# hardware: 2 CPU cores. measured there with bf16 units: 7 s from the start of Python, without evaluations;
# validation loss 1.86 on the full split; nanoGPT's run ends at 1.90 (see the table in README)

dataset = 'shakespeare_char'

preset = 'hybrid'
head_gate = False  # gains nothing in so short a run
n_layer = 3
n_head = 2
n_embd = 128  # 1,107,584 parameters with 65 characters
block_size = 64

batch_size = 24
gradient_accumulation_steps = 1
max_iters = 85

optimizer = 'muon'
muon_lr = 0.065
muon_momentum = 0.85  # lower than usual, because the run is short
learning_rate = 2e-2
embed_lr = 0.1
weight_decay = 0.05
beta1 = 0.8
lr_schedule = 'linear'
decay_fraction = 0.7
warmup_iters = 5
min_lr = 0.0

compile = False  # compiling would take longer than the run

eval_interval = 50
log_interval = 10
