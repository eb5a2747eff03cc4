# Gemma 2 2B tuned for Python tasks with QLoRA of rank 16: its matrices are held in 4 bits
#
#   python prepare.py rows.jsonl --name=python_rows --tokenizer=google/gemma-2-2b
#   python train.py config/qlora_r16.py
#   python sample.py --out_dir=out-qlora-r16 \
#       --eval_code=data/python_rows/val.jsonl --max_new_tokens=384
#
# host memory: 12 GB, because the base is read in float32 (counted, not run)
# on a T4, shorter windows in smaller micro-batches, as many windows per step:
#   python train.py config/qlora_r16.py --block_size=512 --batch_size=4 \
#       --gradient_accumulation_steps=4 --learning_rate=2e-4
# a T4 computes in float16, which the activations of Gemma 2 may exceed (not tried): if steps are
# skipped, use --dtype=float32
# hardware: one GPU of 16 GB or more. time and score: not measured
# Gemma needs pip install tokenizers huggingface_hub, and HF_TOKEN of an account that accepted its license

out_dir = 'out-qlora-r16'
init_from = 'google/gemma-2-2b'
dataset = 'python_rows'
pack_rows = True
block_size = 768

lora_rank = 16
lora_alpha = 32
quantize = 'nf4'
recompute = 'full'  # 7.6 GB by --dry_run; 29.1 without

batch_size = 8  # windows; each holds several rows
gradient_accumulation_steps = 2
max_epochs = 3

learning_rate = 2.5e-4
weight_decay = 0.01
beta2 = 0.999
warmup_iters = 0.03
min_lr = 0.0

eval_interval = 100
log_interval = 25
