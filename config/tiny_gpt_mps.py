# tiny_gpt for an Apple GPU: smaller, with half its context
#
#   python prepare.py tinystories --tokenizer=bpe:4096 --name=tinystories_4096
#   python train.py config/tiny_gpt_mps.py
#   python sample.py --start="Once upon a time"
#
# hardware: an Apple GPU. time and score: not measured

dataset = 'tinystories_4096'

n_layer = 5
n_head = 6
n_embd = 360  # 9,300,600 parameters
block_size = 128

batch_size = 64
gradient_accumulation_steps = 2  # 16,384 tokens per step
max_iters = 32000  # 524 million tokens

learning_rate = 5e-4
min_lr = 5e-5  # cosine down to a tenth
warmup_iters = 500

eval_interval = 400
log_interval = 10
