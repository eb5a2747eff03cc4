# long_32k_medium with twice the layers
#
#   python prepare.py fineweb_edu
#   python train.py config/long_32k_large.py
#   torchrun --standalone --nproc_per_node=4 train.py config/long_32k_large.py
#
# hardware: one GPU of 40 GB or more (counted: 37.4 GB), or several. time and score: not measured
# the sizes are our own choice

dataset = 'fineweb_edu'

position = 'rope'  # a learned table of 32,768 positions would be 50 million parameters
rope_base = 500000
n_layer = 24
n_head = 12  # heads of 128 channels
n_embd = 1536  # 756,819,456 parameters
block_size = 32768

batch_size = 1
gradient_accumulation_steps = 16  # 524,288 tokens per step
recompute = 'selective'  # without it a step needs more than 80 GB
max_iters = 5000

learning_rate = 3e-4
min_lr = 3e-5
lr_schedule = 'onecycle'
warmup_iters = 0.1

eval_interval = 500
log_interval = 10
