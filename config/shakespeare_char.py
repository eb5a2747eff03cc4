# characters of Shakespeare, nanoGPT's recipe: good for learning and experiments
#
#   python prepare.py shakespeare_char
#   python train.py config/shakespeare_char.py
#   python sample.py --start="ROMEO:"
#
# hardware: one GPU. time and score: not measured here;
# nanoGPT reports 3 minutes on an A100, validation loss 1.47
# on a CPU make it smaller: --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
#   --max_iters=2000 --dropout=0.0

dataset = 'shakespeare_char'

n_layer = 6
n_head = 6
n_embd = 384  # 10,745,088 parameters with 65 characters
block_size = 256
dropout = 0.2  # the data is small: it is seen about 80 times

batch_size = 64
gradient_accumulation_steps = 1
max_iters = 5000

learning_rate = 1e-3
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100

eval_interval = 250
log_interval = 10
