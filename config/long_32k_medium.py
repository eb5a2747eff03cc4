# long_32k_small with more layers and channels
#
#   python prepare.py fineweb_edu
#   python train.py config/long_32k_medium.py
#   torchrun --standalone --nproc_per_node=4 train.py config/long_32k_medium.py
#
# hardware: one GPU of 24 GB or more, or several. time and score: not measured
# the sizes are our own choice

dataset = 'fineweb_edu'

position = 'rope'  # a learned table of 32,768 positions would be 50 million parameters
rope_base = 500000
n_layer = 12
n_head = 12  # heads of 128 channels
n_embd = 1536  # 417,043,968 parameters
block_size = 32768

batch_size = 2
gradient_accumulation_steps = 8  # 524,288 tokens per step
recompute = 'selective'  # 19.3 GB by --dry_run
max_iters = 5000

learning_rate = 4e-4
min_lr = 4e-5
lr_schedule = 'onecycle'
warmup_iters = 0.1

eval_interval = 500
log_interval = 10
