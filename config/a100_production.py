# a wider GPT for long runs on one A100
#
#   python prepare.py wikitext103
#   python train.py config/a100_production.py
#
# hardware: one A100. time and score: not measured
# the same steps on several GPUs: torchrun --standalone --nproc_per_node=8 train.py config/a100_production.py

dataset = 'wikitext103'

preset = 'gpt2'
n_layer = 12
n_head = 16
n_embd = 1024  # 203,056,128 parameters
block_size = 512

batch_size = 20
gradient_accumulation_steps = 2  # 20,480 tokens per step
max_iters = 10000

learning_rate = 3e-4
min_lr = 3e-5  # cosine down to a tenth
beta1, beta2 = 0.9, 0.95
weight_decay = 0.1
warmup_iters = 500

eval_interval = 1000
log_interval = 10
