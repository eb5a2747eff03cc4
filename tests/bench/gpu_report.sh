#!/usr/bin/env bash
# all measurements that need a GPU, as Markdown on stdout
#
#   tests/bench/gpu_report.sh PEER DATA_DIR DATASET > report.md
#
# PEER: a clone of karpathy/nanoGPT. DATA_DIR/DATASET: a corpus in GPT-2's tokens, of 20 million or more, made
# by prepare.py --tokenizer=gpt2. To try the script on a CPU, make it small: STEPS=1 SHAPE=small
set -euo pipefail
cd "$(dirname "$0")/../.."
peer=$(realpath "$1") data=$(realpath "$2") dataset=$3
shape=${SHAPE:-124m} steps=${STEPS:-20}
batch=$([ "$shape" = small ] && echo 12 || echo 32)
big=$([ "$shape" = small ] && echo 24 || echo 64)

echo "## one training step, $shape, batch $batch and each side's larger ones"
python tests/bench/step_speed.py --peer="$peer" --shape="$shape" --batch="$batch" --batches "$big" --peer_batches "$big" \
    --steps="$steps" --rounds=5
echo
echo "## each optimization switched off in turn, batch $batch"
python tests/bench/step_speed.py --table --shape="$shape" --batch="$batch" --steps="$steps" --rounds=3
echo
echo "## generation, $shape"
python tests/bench/generate_speed.py --peer="$peer" --shape="$shape" --rounds=3 --batches 1 8 64 \
    --kinds bfloat16 int8 $([ "$shape" = small ] && echo "--prompt=16 --new=40" || true) 2> >(grep "not installed" >&2)
echo
echo "## where the time of a step goes"
out=$(mktemp -d)
small=$([ "$shape" = small ] && echo "--n_layer=4 --n_head=4 --n_embd=128 --block_size=64" || true)
python tests/bench/profile_step.py config/gpt2_124m_fast.py --data_dir="$data" --dataset="$dataset" \
    --batch_size="$batch" --gradient_accumulation_steps=1 --out_dir="$out" $small | tail -32
echo
echo "## wall-clock to nanoGPT's loss"
mkdir -p "$peer/data"
[ -e "$peer/data/$dataset" ] || ln -s "$data/$dataset" "$peer/data/$dataset"
if [ "$shape" = small ]; then
    theirs="config/train_gpt2.py --wandb_log=False --device=cpu --eval_iters=1 --batch_size=12 --gradient_accumulation_steps=1 --block_size=64 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=$((8 * steps)) --lr_decay_iters=$((8 * steps)) --warmup_iters=2"
    ours="config/gpt2_124m_fast.py --batch_size=12 --gradient_accumulation_steps=1 --max_iters=$((8 * steps)) --warmup_iters=2 $small"
else
    theirs="config/train_gpt2.py --wandb_log=False --eval_iters=1 --batch_size=32 --gradient_accumulation_steps=2 --max_iters=920 --lr_decay_iters=920 --warmup_iters=50"
    ours="config/gpt2_124m_fast.py --batch_size=64 --gradient_accumulation_steps=1 --max_iters=460 --warmup_iters=20"
fi
python tests/bench/time_to_loss.py --peer="$peer" --data_dir="$data" --dataset="$dataset" --theirs="$theirs" \
    --ours="$ours" --windows=$([ "$shape" = small ] && echo 16 || echo 512) 2> >(grep seed >&2)
