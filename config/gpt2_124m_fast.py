# a modern GPT with the width and depth of GPT-2 124M: what held at three and six layers on CPUs, by Muon
#
#   python prepare.py openwebtext
#   python train.py config/gpt2_124m_fast.py
#   torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m_fast.py
#
# hardware: one GPU of 40 GB or more, or a node of them. time and score: not measured

dataset = 'openwebtext'

preset = 'hybrid'  # convolutions in two of three layers, vectors for pairs of tokens and for values
n_layer = 12
n_head = 6  # heads of 128 channels
n_embd = 768  # 337,213,728 parameters, 257 million of them in tables and the untied head
block_size = 1024

batch_size = 32
gradient_accumulation_steps = 16  # 512 sequences, 524,288 tokens per step
max_iters = 5000

optimizer = 'muon'
muon_lr = 0.02
learning_rate = 2e-3
embed_lr = 0.05  # as of every depth
lr_schedule = 'linear'
warmup_iters = 100
min_lr = 0.0

eval_interval = 500
log_interval = 10
