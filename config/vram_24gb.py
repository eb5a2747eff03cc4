# a GPT with SwiGLU and label smoothing for a GPU of 24 GB
#
#   python prepare.py wikitext103
#   python train.py config/vram_24gb.py
#
# hardware: one GPU of 24 GB (RTX 3090 or 4090, L4, A10G). time and score: not measured

dataset = 'wikitext103'

mlp = 'swiglu'
n_layer = 24
n_head = 16
n_embd = 1024  # 454,738,944 parameters
n_ff = 4096
block_size = 512
label_smoothing = 0.1

batch_size = 256
gradient_accumulation_steps = 2  # 262,144 tokens per step
recompute = 'full'  # without it a step needs 180 GB
max_iters = 1800  # 4 epochs

learning_rate = 3e-4
min_lr = 3e-5  # cosine down to a tenth
warmup_iters = 0.05

eval_interval = 200
log_interval = 10
