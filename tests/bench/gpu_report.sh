#!/usr/bin/env bash
# all that needs a GPU: the first hour of a machine that has one, as one Markdown file
#
#   tests/bench/gpu_report.sh all [PEER [DATA_DIR DATASET]]     # writes gpu_report/report.md
#
# A part that fails leaves its reason in the report, and the others go on; run the command again to repeat only
# what has not succeeded. It should take less than 90 minutes on an H100 (an estimate: it has run on no GPU
# yet); a part is stopped after LIMIT seconds. PEER: a clone of karpathy/nanoGPT. DATA_DIR/DATASET: a corpus in
# GPT-2's tokens, of 20 million or more, made by prepare.py --tokenizer=gpt2; without one, random tokens.
# `gpu_report.sh PART ...` prints one part. On a CPU, to try the script: SHAPE=small STEPS=1
set -euo pipefail
self=$(realpath "$0")
part=${1:-} peer=${2:+$(realpath "$2")} data=${3:+$(realpath "$3")} dataset=${4:-}
out=$(realpath -m "${OUT:-gpu_report}")
cd "$(dirname "$self")/../.."
shape=${SHAPE:-124m} steps=${STEPS:-20} rounds=3 batch=32 big=64 windows=512 small="" short="" more=""
if [ "$shape" = small ]; then
    rounds=1 batch=12 big=24 windows=16 small="--n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --compile=False"
    short="--prompt=16 --new=40" more="--compile=off"
fi
gpus=$(nvidia-smi -L 2> /dev/null | wc -l || true)
parts="check test_gpu"
[ "$gpus" -lt 2 ] || parts="$parts test_gpus gpus"
parts="$parts step table1 table2 generation int8 profile"
[ -z "$peer" ] || [ -z "$dataset" ] || parts="$parts loss"  # random tokens have no loss to reach
parts=${PARTS:-$parts}

without() {
    echo "## optimizations switched off or replaced, batch $batch: $*"
    python tests/bench/step_speed.py --table "$@" --shape="$shape" --batch="$batch" --steps="$steps" \
        --rounds="$rounds" $more
}

generation() {
    echo "## generation, $shape"
    python tests/bench/generate_speed.py "$@" --shape="$shape" --rounds="$rounds" --batches 1 8 64 $short
}

corpus() {  # sets data and dataset to random tokens where none are given
    [ -z "$dataset" ] || return 0
    data=$(mktemp -d) dataset=random
    mkdir "$data/random"
    (cd tests/bench && python -c "import step_speed; step_speed.write_data('$data/random', 50304, 20_000_000)")
}

profile() {
    corpus
    "$@" --data_dir="$data" --dataset="$dataset" --batch_size="$batch" --out_dir="$(mktemp -d)" $small | tail -32
}

case $part in
all)
    mkdir -p "$out"
    for name in $parts; do
        [ -e "$out/$name.md" ] && continue
        echo "$(date +%T) $name" >&2
        if timeout "${LIMIT:-1200}" "$self" "$name" ${peer:+"$peer"} ${data:+"$data" "$dataset"} \
            > "$out/$name.part" 2> "$out/$name.log"; then
            mv "$out/$name.part" "$out/$name.md"
        else
            echo "part $name failed, see $out/$name.log" >&2
        fi
    done
    {
        echo "# GPU report of $(date +%F), commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown)"
        for name in $parts; do
            echo
            if [ -e "$out/$name.md" ]; then
                cat "$out/$name.md"
            else
                printf '## %s failed\n\n```\n' "$name"
                tail -n 12 "$out/$name.part" "$out/$name.log"
                echo '```'
            fi
        done
    } > "$out/report.part"
    mv "$out/report.part" "$out/report.md"
    echo "$out/report.md is complete" >&2
    exit ;;
check)
    echo "## the machine"
    echo '```'
    python -m hotloop.system.check
    nvidia-smi || echo "no nvidia-smi"
    echo '```' ;;
test_gpu | test_gpus)
    echo "## tests/system/$part.py"
    echo '```'
    python -m pytest -n 0 -rA -s "tests/system/$part.py" | tail -n 60
    echo '```' ;;
gpus)
    for shard in none optimizer full; do
        echo "## $gpus GPUs, shard=$shard"
        profile torchrun --standalone --nproc_per_node="$gpus" tests/bench/profile_step.py config/gpt2_124m_fast.py \
            --gradient_accumulation_steps="$gpus" --shard="$shard"
    done ;;
step)
    echo "## one training step, $shape, batch $batch and each side's larger ones"
    python tests/bench/step_speed.py ${peer:+--peer="$peer" --peer_batches "$big"} --shape="$shape" \
        --batch="$batch" --batches "$big" --steps="$steps" --rounds="$rounds" $more ;;
table1) without "without compile" "float32" "unfused AdamW" "vocabulary not padded" "max-autotune" ;;
table2) without "no flash attention" "deterministic" "loss in 4 chunks" "modern, Muon" ;;
generation) generation ${peer:+--peer="$peer"} --kinds bfloat16 ;;
int8) generation --kinds int8 ;;
profile)
    echo "## where the time of a step goes"
    profile python tests/bench/profile_step.py config/gpt2_124m_fast.py --gradient_accumulation_steps=1 ;;
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
        --ours="$ours" --windows="$windows" ;;
*)
    echo "gpu_report.sh: part '$part' is not one of all, check, test_gpu, test_gpus, gpus, step, table1, table2, generation, int8, profile, loss" >&2
    exit 2 ;;
esac
echo
