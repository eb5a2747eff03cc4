#!/usr/bin/env bash
# all measurements that need a GPU, as Markdown on stdout
#
#   for part in step table1 table2 generation int8 profile loss; do
#       tests/bench/gpu_report.sh $part PEER DATA_DIR DATASET >> report.md
#   done
#
# Each part should take less than ten minutes on an H100 with 80 GB (an estimate: none has run on one yet). PEER:
# a clone of karpathy/nanoGPT. DATA_DIR/DATASET: a corpus in GPT-2's tokens, of 20 million or more, made by
# prepare.py --tokenizer=gpt2. To try the script on a CPU, make it small: STEPS=1 SHAPE=small
set -euo pipefail
cd "$(dirname "$0")/../.."
part=$1 peer=$(realpath "$2") data=$(realpath "$3") dataset=$4
shape=${SHAPE:-124m} steps=${STEPS:-20} batch=32 big=64 windows=512 small="" short=""
if [ "$shape" = small ]; then
    batch=12 big=24 windows=16 small="--n_layer=4 --n_head=4 --n_embd=128 --block_size=64" short="--prompt=16 --new=40"
fi

without() {
    echo "## optimizations switched off or replaced, batch $batch: $*"
    python tests/bench/step_speed.py --table "$@" --shape="$shape" --batch="$batch" --steps="$steps" --rounds=3
}

generation() {
    echo "## generation, $shape"
    python tests/bench/generate_speed.py "$@" --shape="$shape" --rounds=3 --batches 1 8 64 $short 2> >(grep "not installed" >&2)
}

case $part in
step)
    echo "## one training step, $shape, batch $batch and each side's larger ones"
    python tests/bench/step_speed.py --peer="$peer" --shape="$shape" --batch="$batch" --batches "$big" --peer_batches "$big" \
        --steps="$steps" --rounds=5 ;;
table1) without "without compile" "float32" "unfused AdamW" "vocabulary not padded" ;;
table2) without "no flash attention" "not deterministic" "loss in 4 chunks" "modern, Muon" ;;
generation) generation --peer="$peer" --kinds bfloat16 ;;
int8) generation --kinds int8 ;;
profile)
    echo "## where the time of a step goes"
    python tests/bench/profile_step.py config/gpt2_124m_fast.py --data_dir="$data" --dataset="$dataset" \
        --batch_size="$batch" --gradient_accumulation_steps=1 --out_dir="$(mktemp -d)" $small | tail -32 ;;
loss)
    echo "## wall-clock to nanoGPT's loss"
    mkdir -p "$peer/data"
    [ -e "$peer/data/$dataset" ] || ln -s "$data/$dataset" "$peer/data/$dataset"
    theirs="config/train_gpt2.py --wandb_log=False --eval_iters=1"
    ours="config/gpt2_124m_fast.py --gradient_accumulation_steps=1 $small"
    if [ "$shape" = small ]; then
        theirs="$theirs --device=cpu --batch_size=12 --gradient_accumulation_steps=1 $small --max_iters=$((8 * steps)) --lr_decay_iters=$((8 * steps)) --warmup_iters=2"
        ours="$ours --batch_size=12 --max_iters=$((8 * steps)) --warmup_iters=2"
    else
        theirs="$theirs --batch_size=32 --gradient_accumulation_steps=2 --max_iters=920 --lr_decay_iters=920 --warmup_iters=50"
        ours="$ours --batch_size=64 --max_iters=460 --warmup_iters=20"
    fi
    python tests/bench/time_to_loss.py --peer="$peer" --data_dir="$data" --dataset="$dataset" --theirs="$theirs" \
        --ours="$ours" --windows="$windows" 2> >(grep seed >&2) ;;
*)
    echo "gpu_report.sh: part '$part' is not one of step, table1, table2, generation, int8, profile, loss" >&2
    exit 2 ;;
esac
echo
