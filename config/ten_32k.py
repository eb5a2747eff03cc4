# Temporal Eigenstate Networks, the document's small model: a context of 32,768 tokens without attention
#
#   python prepare.py fineweb_edu
#   python train.py config/ten_32k.py
#   python train.py config/ten_32k.py --eigen=long   # memories of up to the context at the start
#
# hardware: one GPU of 24 GB or more. time and score: not measured; config/ten_cpu.py is for a CPU

dataset = 'fineweb_edu'

mixer = 'eigen'
eigen = 'paper'
num_eigenstates = 128
position = 'rope'  # which only attention uses: there is no table of positions
n_layer = 8
n_head = 8
n_embd = 1024  # 133,360,640 parameters
block_size = 32768

batch_size = 4
gradient_accumulation_steps = 4  # 524,288 tokens per step
recompute = 'full'
max_iters = 5000

learning_rate = 6e-4
min_lr = 6e-5
lr_schedule = 'onecycle'
warmup_iters = 0.1

eval_interval = 500
log_interval = 10
