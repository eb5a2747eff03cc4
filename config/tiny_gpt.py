# a small GPT on short stories, with a BPE of 4,096 tokens trained on them
#
#   python prepare.py tinystories --tokenizer=bpe:4096 --name=tinystories_4096
#   python train.py config/tiny_gpt.py
#   python sample.py --start="Once upon a time"
#
# hardware: one GPU of 16 GB or more. time and score: not measured

dataset = 'tinystories_4096'

n_layer = 6
n_head = 8
n_embd = 512  # 21,109,248 parameters
block_size = 256

batch_size = 128
gradient_accumulation_steps = 1  # 32,768 tokens per step
max_iters = 50000  # 1.6 billion tokens

learning_rate = 5e-4
min_lr = 5e-5  # cosine down to a tenth
warmup_iters = 500

eval_interval = 500
log_interval = 10
