# a GPT with a context of 32,768 tokens
#
#   python prepare.py fineweb_edu
#   python train.py config/long_32k_small.py
#   torchrun --standalone --nproc_per_node=4 train.py config/long_32k_small.py
#
# hardware: one GPU of 24 GB or more, or several. time and score: not measured

dataset = 'fineweb_edu'

position = 'rope'  # a learned table of 32,768 positions would have 34 million parameters
rope_base = 500000
n_layer = 8
n_head = 8  # heads of 128 channels
n_embd = 1024  # 152,192,000 parameters
block_size = 32768

batch_size = 4
gradient_accumulation_steps = 4  # 524,288 tokens per step
recompute = 'selective'  # 15.2 GB by --dry_run
max_iters = 5000

learning_rate = 6e-4
min_lr = 6e-5
lr_schedule = 'onecycle'
warmup_iters = 0.1

eval_interval = 500
log_interval = 10
