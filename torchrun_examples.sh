#!/usr/bin/env bash
# Every way to launch the main job, and the other commands, by name.
#
#   ./torchrun_examples.sh                  lists the examples
#   ./torchrun_examples.sh NAME [FLAGS...]  prints one's exact command and runs it; FLAGS go to that command
#   ./torchrun_examples.sh all [FLAGS...]   runs all that this machine can run, and says what it skips and why; FLAGS go
#                                           to ddp.train
set -euo pipefail
cd "$(dirname "$0")"
[ -d .venv/bin ] && PATH="$PWD/.venv/bin:$PATH"

names=()
declare -A shows needs commands

# example NAME 'what it shows' 'what it needs: -, so many GPUs, the program of a cluster, or time: then all leaves it out' 'command, with FLAGS where ddp.train's flags go (AGAIN, if it is to
# continue what it has begun) and RUN for its run directory, or OPTIONS where those of another command do'
example() {
    names+=("$1")
    shows[$1]=$2 needs[$1]=$3 commands[$1]=$4
}

example one-process 'no torchrun: the same code as a group of one' - \
    'python -m ddp.train FLAGS'
example two-processes 'one node, two ranks: gradients averaged in shared memory (or by NCCL where there are GPUs for both)' - \
    'torchrun --nproc_per_node=2 -m ddp.train FLAGS'
example accumulation 'four micro-steps per optimizer step; gradients cross the network once' - \
    'torchrun --nproc_per_node=2 -m ddp.train --grad-accumulation-steps 4 FLAGS'
example bf16 'automatic mixed precision in bfloat16: autocast, no scaler' - \
    'torchrun --nproc_per_node=2 -m ddp.train --precision bf16 FLAGS'
example fp16 'automatic mixed precision in float16: autocast, GradScaler, clipping after unscaling' - \
    'torchrun --nproc_per_node=2 -m ddp.train --precision fp16 --clip-norm 5 FLAGS'
example syncbn 'BatchNorm over the global batch: the result no longer depends on the number of ranks' - \
    'torchrun --nproc_per_node=2 -m ddp.train --sync-batchnorm FLAGS'
example by-hand 'DistributedDataParallel written by hand, with its buckets summed in shared memory' - \
    'torchrun --nproc_per_node=2 -m ddp.train --device cpu --strategy handwritten --all-reduce shared-memory FLAGS'
example fast 'shared memory and bf16 where this machine has them: the job prints what it chose and why' - \
    'torchrun --nproc_per_node=2 -m ddp.train --fast FLAGS'
example zero3 'a transformer whose parameters, gradients and optimizer state are divided over the ranks (ZeRO-3), on text' - \
    'torchrun --nproc_per_node=2 -m ddp.train --device cpu --model gpt --strategy zero3 --all-reduce shared-memory --optimizer adamw FLAGS'
example profile 'a torch.profiler trace of each rank, for https://ui.perfetto.dev' - \
    'torchrun --nproc_per_node=2 -m ddp.train --profile --all-reduce backend --epochs 1 FLAGS'
example two-nodes 'two torchrun agents that meet at a rendezvous, as two nodes would; here both on localhost' - \
    "trap 'kill \$(jobs -p) 2>/dev/null' EXIT
torchrun --nnodes=2 --nproc_per_node=1 --rdzv-backend=c10d --rdzv-endpoint=localhost:PORT -m ddp.train --device cpu FLAGS & one=\$!
torchrun --nnodes=2 --nproc_per_node=1 --rdzv-backend=c10d --rdzv-endpoint=localhost:PORT -m ddp.train --device cpu FLAGS & two=\$!
wait \$one && wait \$two"
example preempt 'a job that is stopped after its first checkpoint, as a scheduler stops it, and continues where it was' - \
    'torchrun --nproc_per_node=2 -m ddp.train --checkpoint-every 20 FLAGS & job=$!
while kill -0 $job 2>/dev/null && ! ls RUN/checkpoints/epoch-* >/dev/null 2>&1; do sleep 0.2; done
kill -TERM $job; wait $job
cat RUN/requeue.json
torchrun --nproc_per_node=2 -m ddp.train --checkpoint-every 20 AGAIN --auto-resume'
example resume 'an epoch each on two ranks, on one, and on three: the global batches are the same' - \
    'torchrun --nproc_per_node=2 -m ddp.train --device cpu --schedule constant FLAGS --epochs 1 &&
python -m ddp.train --device cpu --schedule constant AGAIN --epochs 2 --resume &&
torchrun --nproc_per_node=3 -m ddp.train --device cpu --schedule constant AGAIN --epochs 3 --resume'
example elastic 'a rank is killed after the first checkpoint; torchrun starts all again, and they continue from there' - \
    'torchrun --max-restarts=3 --nproc_per_node=2 -m ddp.train --checkpoint-every 20 FLAGS & job=$!
while kill -0 $job 2>/dev/null && ! ls RUN/checkpoints/epoch-* >/dev/null 2>&1; do sleep 0.2; done
pkill -KILL --newest --parent $job; wait $job'
example files 'training from JPEG files, decoded by the fast loader as they are needed' - \
    'torchrun --nproc_per_node=2 -m ddp.train --dataset lfw FLAGS'
example own-model 'a model and a data set of your own: two functions in a module' - \
    'torchrun --nproc_per_node=2 -m ddp.train --model examples.own_model_and_dataset:build --dataset examples.own_model_and_dataset:load FLAGS'
example loading 'what loading costs here: a sweep over workers, the cost of each stage, a verdict' - \
    'python -m dataloading.bench OPTIONS'
example slow-storage 'files that answer after 20 ms, one at a time and 16 at a time' - \
    'python -m dataloading.bench --workers 2 --fetch-threads 1,16 --latency-ms 20 --batches 30 OPTIONS'
example ladder 'from the usual pipeline to the fast loader, one change at a time' - \
    'python -m dataloading.ladder OPTIONS'
example dataparallel 'the same training in one process with many devices: the batch scattered in every step' - \
    'python -m dataparallel.train --run-dir runs/examples/dataparallel --overwrite OPTIONS'
example when-it-pays 'nn.DataParallel and its four steps by hand: from which batch on they pay, and which step takes the time' - \
    'python -m dataparallel.bench OPTIONS'
example climb 'from the usual first script to the fastest run, one change at a time' - \
    'python -m ddp.ladder OPTIONS'
example scaling 'why two is not twice as fast: one process, many devices and many processes take turns' - \
    'python -m ddp.bench scaling OPTIONS'
example all-reduces 'all-reduce by each algorithm, from 4 B to 100 MiB: time, bandwidth, and what memory allows' - \
    'python -m ddp.bench allreduce OPTIONS'
example engines 'the DDP written by hand against torch, on four models, and what each of their parts costs' - \
    'python -m ddp.bench engines OPTIONS'
example sharding 'ZeRO-1, 2 and 3 by hand against replicas and fully_shard, by the time of a step' - \
    'python -m ddp.bench sharding OPTIONS'
example memory 'what a rank holds and sends at each stage of sharding, beside the formulas' - \
    'python -m ddp.bench memory OPTIONS'
example two-gpus 'one rank per GPU, over NCCL' 2 \
    'torchrun --nproc_per_node=2 -m ddp.train --backend nccl FLAGS'

example audit 'whether a script of yours does distributed training right; here one that does not' - \
    'python -m ddp.audit OPTIONS -- ddp/museum/replicas/around_the_wrapper.py || test $? = 1'
example audit-again 'whether it comes to the same on other ranks, with more micro-steps, and killed and resumed' - \
    'python -m ddp.audit OPTIONS --vary ranks,micro-steps,resume --batch-flag batch-size --accumulation-flag micro-steps -- ddp/audit/libraries/torch_alone.py {run} --batch-size 12 --micro-steps 2'
example museum 'a silent bug of distributed training, as it was found and fixed, with what the audit says' - \
    'python -m ddp.museum mean_of_means OPTIONS'
example gpu-check 'all that a machine without a GPU cannot prove, tried on this one in ten minutes, with a summary to keep' time \
    'ddp/gpu_check/run.sh OPTIONS'
example measure 'all that the READMEs have numbers and figures from, one part after another; --list says how long each takes' time \
    'python -m maintain.measure OPTIONS'
example doctor 'what a launcher has started: ranks, hosts, versions, latency and bandwidth' - \
    'torchrun --nproc_per_node=2 -m ddp.launch.doctor OPTIONS'
example slurm 'a batch job of SLURM: a torchrun agent on each node' sbatch \
    'sbatch --wait ddp/launch/slurm.sbatch OPTIONS'
example slurm-srun 'the same without torchrun: srun starts the ranks' sbatch \
    'sbatch --wait ddp/launch/slurm-srun.sbatch OPTIONS'
example lsf 'a batch job of LSF: a torchrun agent on each host' bsub \
    'FLAGS="OPTIONS" bsub -K < ddp/launch/lsf.bsub'
example azure 'a job of Azure ML, which starts the ranks itself' az \
    'az ml job create --stream --file ddp/launch/azureml.yml OPTIONS'
example kubeflow 'a TrainJob of the Kubeflow Trainer on Kubernetes' kubectl \
    'kubectl apply --filename ddp/launch/kubernetes.yml OPTIONS'
example kubernetes 'an Indexed Job on Kubernetes without any operator' kubectl \
    'kubectl apply --filename ddp/launch/kubernetes-job.yml OPTIONS'

gpus() { nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true; }

# Why an example cannot run here; nothing when it can.
obstacle() {
    case ${needs[$1]} in
    - | time) ;;
    [0-9]*) [ "$(gpus)" -ge "${needs[$1]}" ] || echo "needs ${needs[$1]} GPUs, this machine has $(gpus)" ;;
    *) command -v "${needs[$1]}" >/dev/null || echo "needs a cluster, and its ${needs[$1]} here" ;;
    esac
}

free_port() { python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }

run() {
    local name=$1 flags options='' command run_dir number
    shift
    run_dir=runs/examples/$name
    for number in $(seq 2 $#); do # the last of FLAGS's own, if there is one
        [ "${*:number-1:1}" != --run-dir ] || run_dir=${*:number:1}
    done
    [ $# = 0 ] || printf -v options '%q ' "$@"
    printf -v flags '%q ' --run-dir "runs/examples/$name" "$@"
    command=${commands[$name]//FLAGS/"--overwrite ${flags% }"}
    command=${command//AGAIN/"${flags% }"}
    command=${command//RUN/$run_dir}
    command=${command//OPTIONS/"${options% }"}
    [[ $command != *PORT* ]] || command=${command//PORT/$(free_port)}
    printf '\n# %s: %s\n%s\n' "$name" "${shows[$name]}" "$command"
    bash -c "$command"
}

case ${1:-} in
'' | -h | --help)
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    printf '\n'
    for name in "${names[@]}"; do printf '  %-14s %s\n' "$name" "${shows[$name]}"; done
    ;;
all)
    shift
    failed=()
    for name in "${names[@]}"; do
        reason=$(obstacle "$name")
        case ${needs[$name]} in
        time) reason='it runs many of the others, for minutes or hours: run it by its name' ;;
        [a-z]*) reason=${reason:-it takes other machines: run it by its name} ;;
        esac
        if [ -n "$reason" ]; then
            printf '\n# %s: skipped, %s\n' "$name" "$reason"
        else
            case ${commands[$name]} in *OPTIONS*) run "$name" ;; *) run "$name" "$@" ;; esac || failed+=("$name")
        fi
    done
    [ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
    ;;
*)
    name=$1
    shift
    [ -n "${commands[$name]:-}" ] || { echo "error: no example '$name'; ./torchrun_examples.sh lists them" >&2; exit 2; }
    reason=$(obstacle "$name")
    [ -z "$reason" ] || { echo "error: $name $reason" >&2; exit 2; }
    run "$name" "$@"
    ;;
esac
