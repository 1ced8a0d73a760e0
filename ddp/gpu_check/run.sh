#!/usr/bin/env bash
# Tries on this machine's GPUs what a machine without one cannot prove: the tests marked gpu, trainings, benchmarks.
#
#   ./torchrun_examples.sh gpu-check                  on all GPUs, in about ten minutes
#   ./torchrun_examples.sh gpu-check --device cpu     a rehearsal of the same commands, small
#   ... --output FOLDER                               instead of runs/gpu-check-<date>; must be new or empty
#
# A command that fails, or does not end within its limit, does not end the others. What is printed is FOLDER/summary.txt, too,
# and each command has FOLDER/NAME.log. The exit status is 1 if a command failed, and 2 for wrong flags.
set -uo pipefail
cd "$(dirname "$0")/../.."

device=auto output=runs/gpu-check-$(date +%Y%m%d-%H%M%S)
while [ $# -gt 0 ]; do
    case "$1 ${2:-}" in
    --help\ * | -h\ *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    '--device cpu' | '--device cuda') device=$2 ;;
    --output\ ?*) output=$2 ;;
    *) echo "error: gpu-check takes --device cpu or cuda, and --output FOLDER; here is '$*'" >&2; exit 2 ;;
    esac
    shift 2
done
read -r gpus memory_gb machine < <(python -c '
import platform, torch
gpus = torch.cuda.device_count()
first = torch.cuda.get_device_properties(0) if gpus else None
versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"
print(gpus, first.total_memory // 10**9 if first else 0, f"{gpus} GPUs, {first.name if first else None}, {versions}")
') || { echo 'error: gpu-check needs a python with torch' >&2; exit 2; }
[ "$device" != auto ] || device=$([ "$gpus" = 0 ] && echo cpu || echo cuda)
if [ "$device" = cpu ]; then
    export CUDA_VISIBLE_DEVICES=
elif [ "$gpus" = 0 ]; then
    echo 'error: --device cuda, but torch sees no GPU here: use --device cpu' >&2; exit 2
fi
if ! mkdir -p "$output" || [ -n "$(ls -A "$output")" ]; then
    echo "error: --output $output: give a new or an empty folder" >&2; exit 2
fi

set -m # Each command gets a process group, which ends as a whole.
scratch=$(mktemp -d) job='' failures=0
trap 'rm -rf "$scratch"' EXIT
trap '[ -z "$job" ] || { kill -- "-$job"; wait "$job"; } 2>/dev/null; exit 130' INT TERM

say() { printf '%s\n' "$*" | tee -a "$output/summary.txt"; }

# check NAME SECONDS 'what it shows' 'command', in which OUT is a folder that is kept, and RUN one that is not
check() {
    local name=$1 limit=$2 command status=0 began=$SECONDS log=$output/$1.log
    command=${4//OUT/$(printf %q "$output/$name")}
    command=${command//RUN/$(printf %q "$scratch/$name")}
    printf '%s\n\n' "$command" >"$log"
    timeout --kill-after=20 "$limit" bash -c "$command" >>"$log" 2>&1 </dev/null &
    job=$!
    wait "$job" || status=$?
    job=''
    if [ "$status" = 0 ]; then
        say "$(printf '%-8s %4d s  %-14s %s; %s' ok $((SECONDS - began)) "$name" "$3" "$log")"
    else
        failures=$((failures + 1))
        [ "$status" != 124 ] || status="124, no end within $limit s"
        say "$(printf '%-8s %4d s  %-14s %s; exit status %s; %s' failed $((SECONDS - began)) "$name" "$3" "$status" "$log")"
    fi
}

# left_out NAME 'why'
left_out() { say "$(printf '%-8s %6s  %-14s %s' 'left out' '' "$1" "$2")"; }

# One rank for each GPU, over NCCL; on the CPU two, over gloo.
if [ "$device" = cuda ]; then
    ranks=$((gpus < 8 ? gpus : 8))
    per_gpu=$((memory_gb < 24 ? 48 : 144)) # images of 224x224 through ResNet-50: about 0.1 GB each in fp32
    batch=$((per_gpu * ranks))
    steps=$((12000 / batch < 40 ? 12000 / batch : 40)) # there are 12,000 glyphs
    large="--model resnet50 --batch-size $batch --train-samples $((steps * batch)) --test-samples 256 --lr 0.01 --log-every 5"
    faces="--batch-size $((48 * ranks)) --log-every 5"
    text="--batch-size $((24 * ranks)) --train-samples $((480 * ranks)) --test-samples 100"
    overhead="--batch-size $((48 * ranks)) --builds 2 --rounds 4 --steps 20"
    overhead_large="--model resnet50 --precision bf16 --batch-size $batch --builds 1 --rounds 4 --steps 10"
    safety="--batch-size $((48 * ranks)) --builds 2 --rounds 2 --steps 20"
    scaling="--processes $(seq -s, 1 $((ranks < 4 ? ranks : 4))) --model resnet50 --precision bf16 --batch-size $((per_gpu / 2)) --builds 1 --rounds 3 --steps 5"
    engines='--models resnet50,mlp,deep-mlp --builds 1 --rounds 5'
    allreduce='--sizes 4096,65536,1048576,26214400,104857600 --rounds 10'
    devices=$(printf ',cuda:%s' $(seq 0 $((ranks - 1))))
else
    ranks=2
    large='--model resnet50 --image-size 28 --batch-size 4 --train-samples 8 --test-samples 4 --lr 0.01 --log-every 1'
    faces='--train-samples 96 --test-samples 24 --image-size 32 --model fashion-cnn'
    text='--batch-size 8 --train-samples 32 --test-samples 8 --width 32 --layers 2'
    overhead='--batch-size 144 --builds 1 --rounds 2 --steps 2'
    overhead_large='--model resnet50 --image-size 28 --batch-size 4 --builds 1 --rounds 2 --steps 1'
    safety='--batch-size 144 --builds 1 --rounds 2 --steps 4'
    scaling='--processes 1,2 --builds 1 --rounds 2 --steps 2'
    engines='--models deep-mlp --builds 1 --rounds 2 --turn 0.05'
    allreduce='--sizes 4096,1048576 --rounds 2'
    devices=,cpu,cpu
fi
small="--batch-size $((48 * ranks)) --train-samples $((480 * ranks)) --test-samples 100 --log-every 2"
on_ranks="torchrun --nproc_per_node=$ranks -m"
train="$on_ranks ddp.train --device $device --timeout 60 --run-dir RUN"
once="$train --overwrite --epochs 1"
longer="$train $small --epochs 12 --checkpoint-every 5"

say "$machine; $ranks ranks, $device; commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
check versions 60 'the ranks, their software, the links between them' "$on_ranks ddp.launch.doctor --device $device"
if [ "$device" = cuda ]; then
    check gpu-tests 400 'the tests that are marked gpu' 'python -m pytest -q -p no:cacheprovider -m "gpu and not slow"'
else
    left_out gpu-tests 'it needs a GPU'
fi
for precision in fp32 bf16 fp16; do
    check "$precision" 120 "ResNet-50 in $precision: images/s, peak memory" "$once --precision $precision $large"
done
check by-hand 90 'the DDP written by hand' "$once --strategy handwritten $small"
for stage in zero1 zero2 zero3; do
    check "$stage" 90 "a transformer, sharded ($stage)" "$once --model gpt --strategy $stage --optimizer adamw $text"
done
check files 120 'training from JPEG files, which loader workers decode' "$once --dataset lfw $faces"
if [ "$device" = cuda ]; then
    check compile 120 'torch.compile with CUDA graphs' "$once --compile reduce-overhead $small"
else
    left_out compile 'it needs a GPU'
fi
check profile 90 'steps 11 to 14, for https://ui.perfetto.dev' \
    "$once --profile --batch-size $((48 * ranks)) --train-samples $((960 * ranks)) --test-samples 100 --log-every 100 && mkdir OUT && cp RUN/profile/* OUT"
check resume 120 'all ranks are killed after a checkpoint; the run continues' \
    "$longer --overwrite & job=\$!
while kill -0 \$job 2>/dev/null && ! ls RUN/checkpoints/epoch-* >/dev/null 2>&1; do sleep 0.1; done
pkill -KILL --parent \$job; wait \$job
$longer --resume 2>&1 | tee RUN.txt && grep -q 'resuming after step' RUN.txt"
check dataparallel 90 'one process with all devices' \
    "python -m dataparallel.train --devices ${devices#,} --epochs 1 $small --run-dir RUN --overwrite"
check overhead 90 'the trainer against a bare loop' "$on_ranks ddp.bench overhead --device $device $overhead --output OUT"
check overhead-large 90 'the same on ResNet-50' "$on_ranks ddp.bench overhead --device $device $overhead_large --output OUT"
check safety 120 'the guards and checkpoints against a step without' \
    "$on_ranks ddp.bench safety --device $device $safety --output OUT"
check engines 150 "the DDP by hand against torch's" \
    "python -m ddp.bench engines --device $device --ranks $ranks $engines --output OUT"
check scaling 120 'why two is not twice as fast' "python -m ddp.bench scaling --device $device $scaling --output OUT"
if [ "$ranks" -gt 1 ]; then
    check allreduce 90 "the backend's all-reduce by size" \
        "python -m ddp.bench allreduce --device $device --ranks $ranks $allreduce --output OUT"
else
    left_out allreduce 'one GPU has nothing to sum'
fi
say "$failures failed; all of this is in $output/summary.txt"
[ "$failures" = 0 ]
