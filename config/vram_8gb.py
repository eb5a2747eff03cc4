# a GPT with SwiGLU and label smoothing for a GPU of 8 GB
#
#   python prepare.py wikitext103
#   python train.py config/vram_8gb.py
#
# hardware: one GPU of 8 GB (RTX 3060 or 4060). time and score: not measured

dataset = 'wikitext103'

mlp = 'swiglu'
n_layer = 8
n_head = 8
n_embd = 512  # 59,449,856 parameters
n_ff = 2048
block_size = 256
label_smoothing = 0.1

batch_size = 64
gradient_accumulation_steps = 8  # 131,072 tokens per step
max_iters = 3600  # 4 epochs

learning_rate = 1e-3
min_lr = 1e-4  # cosine down to a tenth
warmup_iters = 0.05

eval_interval = 400
log_interval = 10
