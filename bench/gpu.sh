#!/usr/bin/env bash
# All benchmarks for one machine with a GPU, in eight minutes; `bench/gpu.sh --help`.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bench/gpu.sh [--device cuda|cpu] [--wheels DIR] [--out DIR] [--python PYTHON]

Builds pyblockpool, measures it in at most eight minutes, and prints a short table last. It needs a
Python that has PyTorch and pip, a C++17 compiler and the headers of Python, and no network if what
is missing lies in DIR. Its own environment, build/gpu, sees the packages of that Python.

  --device   cuda (the default), or cpu, which shows that the script works
  --wheels   a folder of wheels; all of them are installed, as they are, and nothing is downloaded.
             pyblockpool's own wheel, or what it takes to build one (scikit-build-core, cython,
             pybind11, hatch-fancy-pypi-readme with what they need; cmake and ninja, where the
             machine has none); pytest, pytest-benchmark, py-cpuinfo; rich, numpy; vLLM. What the
             machine's Python has can be left out. A vLLM for a PyTorch that no build of vLLM is
             made for:
             VLLM_TARGET_DEVICE=empty pip wheel --no-deps --no-binary vllm vllm==0.26.0
  --out      for the results, as JSON; default: bench/results/gpu, with --device cpu .../gpu_cpu
  --python   default: python3

The parts, each with a limit of its own:

  kernel     bench/kernel_prefill.py, a compiled FlexAttention by block table
  transfer   bench/transfer.py, block tables as copies
  micro      bench/micro, operations of the queue; needs vLLM and pytest-benchmark
  prefill    bench/e2e_prefill.py, engines with each attention backend; needs vLLM

A part that fails or runs out of time does not stop the others; the exit status is then 1. A part
that lacks what it needs is named, with the reason. Exit status 2: nothing could be measured.
TEXT
}

die() {
  echo "gpu.sh: $1" >&2
  exit 2
}

device=cuda wheels='' out='' python=python3
while (($#)); do
  case $1 in
    --help | -h) usage && exit ;;
    --device | --wheels | --out | --python)
      (($# > 1)) || die "$1 needs a value; see bench/gpu.sh --help"
      declare "${1#--}=$2"
      shift 2
      ;;
    *) die "unknown option $1; see bench/gpu.sh --help" ;;
  esac
done
[[ $device == cuda || $device == cpu ]] || die "--device $device: cuda or cpu"
[[ -z $wheels || -d $wheels ]] || die "--wheels $wheels: no such folder"
python=$("$python" -c 'import pip, sys, torch; print(sys.executable)') ||
  die "$python has no PyTorch, or no pip: name one that has both with --python"
if [[ $device == cuda ]]; then
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    die "the PyTorch of $python finds no GPU; --device cpu needs none"
fi

SECONDS=0
readonly BUDGET=470 # of them; ten more for the table
bench=$(cd "$(dirname "$0")" && pwd)
work=$(dirname "$bench")/build/gpu
[[ $device == cuda ]] && default=gpu || default=gpu_cpu
mkdir -p "${out:=$bench/results/$default}" "$work/logs"
out=$(cd "$out" && pwd)
from=()
if [[ $wheels ]]; then
  wheels=$(cd "$wheels" && pwd)
  from=(--no-index --find-links "$wheels")
fi
# From here on not in the checkout: it has the package without its compiled module.
cd "$work"
rm -rf env dist parts.tsv backends.tsv logs/*

# --- the environment ---

logged() { # NAME COMMAND...: a step without which nothing can be measured
  local name=$1
  shift
  "$@" >>"logs/$name.log" 2>&1 || {
    tail -n 20 "logs/$name.log" >&2
    die "$name failed: see $work/logs/$name.log"
  }
}

reason() { # of a failure: the first error that a log names, or else its last line
  { grep -m 1 -E '^(E +)?[[:alnum:]_.]+(Error|Exception): ' "$1" || tail -n 1 "$1"; } | tr '\t' ' '
}

has_wheel() { [[ $wheels ]] && compgen -G "$wheels/$1*.whl" >/dev/null; }

in_time() { timeout --foreground $((BUDGET - SECONDS)) env/bin/python "$@"; }

in_env() { in_time -m pip --disable-pip-version-check --no-input --retries 1 "$@"; }

build() { # with the packages at hand, or else with those that pip can get
  local wheel=(wheel --no-deps --wheel-dir dist)
  in_env "${wheel[@]}" --no-build-isolation --check-build-dependencies "$(dirname "$bench")" ||
    in_env "${wheel[@]}" "${from[@]}" "$(dirname "$bench")"
}

echo "setup: environment and pyblockpool, logs in $work/logs"
logged environment "$python" -m venv --without-pip --system-site-packages env
site=$(echo "$PWD"/env/lib/python3*/site-packages)
# Where PYTHON is a venv itself, system-site-packages are not those of this one.
"$python" -c 'import sysconfig
for path in dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib"))):
    print(f"import site; site.addsitedir({path!r})")' >"$site/packages_of_python.pth"
if has_wheel ''; then
  logged wheels in_env install --no-index --no-deps "$wheels"/*.whl
fi
if ! has_wheel pyblockpool-; then
  logged build build
  logged install in_env install --no-deps --force-reinstall dist/*.whl
fi
logged install in_env install "${from[@]}" pyblockpool
pytest_reason=''
in_env install "${from[@]}" 'pytest>=9.2' 'pytest-benchmark>=5.3' >logs/pytest.log 2>&1 ||
  pytest_reason="no pytest-benchmark: $(reason logs/pytest.log)"
# A vLLM without compiled code: vLLM on CUDA imports these modules by name, and needs no more.
if [[ -d $site/vllm ]] && ! compgen -G "$site/vllm/_C*.so" >/dev/null; then
  touch "$site/vllm/_C.py" "$site/vllm/_C_stable_libtorch.py"
fi
in_time "$bench/attention_backends.py" --device "$device" --out backends.tsv \
  >logs/backends.log 2>&1 ||
  printf 'vLLM\tvLLM cannot be asked: %s\n' "$(reason logs/backends.log)" >backends.tsv

# --- the parts ---

running=''
trap '[[ -z $running ]] || kill "$running"; exit 130' INT TERM

row() { printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" | tee -a parts.tsv; }

part() { # NAME LIMIT COMMAND...: writes $out/NAME.json
  local name=$1 limit=$2 began=$SECONDS status=0
  shift 2
  rm -f "$out/$name.json"
  ((limit <= BUDGET - SECONDS)) || limit=$((BUDGET - SECONDS))
  if ((limit < 20)); then
    row "$name" "out of time" 0 "not begun: no time was left"
    return
  fi
  echo "$name: at most $limit s"
  timeout --kill-after=5 "$limit" "$@" >"logs/$name.log" 2>&1 &
  running=$!
  wait "$running" || status=$?
  running=''
  if ((status == 0)); then
    row "$name" "done" $((SECONDS - began)) ''
  elif ((status == 124 || SECONDS - began >= limit)); then
    row "$name" "out of time" $((SECONDS - began)) "stopped after $limit s"
  else
    tail -n 20 "logs/$name.log" >&2
    row "$name" failed $((SECONDS - began)) "$(reason "logs/$name.log")"
  fi
}

not_run() { # NAME REASON
  rm -f "$out/$1.json"
  row "$1" "not run" 0 "$2"
}

why_not() { # NAME: of vLLM, or a backend; empty if it can run
  sed -n "s/^$1\t//p" backends.tsv
}

prefill() { # NAME LIMIT BACKEND OPTIONS...
  local name=$1 limit=$2 backend=$3 reason
  shift 3
  reason=$(why_not vLLM)
  reason=${reason:-$(why_not "$backend")}
  if [[ $reason ]]; then
    not_run "$name" "$reason"
  else
    part "$name" "$limit" env/bin/python "$bench/e2e_prefill.py" --device "$device" \
      --out "$out/$name.json" --backends "$backend" "${shape[@]}" "$@"
  fi
}

# What the eight minutes are shared out for; longer runs are those of the benchmarks themselves.
if [[ $device == cuda ]]; then
  shape=(--prompt 16384 --num-blocks 8192 --rounds 8)
else
  shape=(--rounds 3)
fi

part kernel 100 env/bin/python "$bench/kernel_prefill.py" --device "$device" --short \
  --out "$out/kernel.json"
part transfer 60 env/bin/python "$bench/transfer.py" --device "$device" --short --alone \
  --out "$out/transfer.json"
reason=$(why_not vLLM)
if [[ $reason || $pytest_reason ]]; then
  not_run micro "${reason:-$pytest_reason}"
else
  part micro 100 env/bin/python -m pytest -c "$(dirname "$bench")/pyproject.toml" \
    "$bench/micro/bench_queue.py" "$bench/micro/bench_pool.py" -p no:cacheprovider -W ignore \
    --benchmark-disable-gc --short -k 'repeat0 and not flat and not 1000000' \
    --results="$out/micro.json"
fi
prefill prefill_FLEX_ATTENTION 150 FLEX_ATTENTION --scenes idle \
  --variants vLLM 'native + reset' extent
prefill prefill_FLEX_ATTENTION_busy 110 FLEX_ATTENTION --scenes busy --variants vLLM extent
for backend in FLASH_ATTN TRITON_ATTN FLASHINFER; do
  prefill "prefill_$backend" 60 "$backend" --scenes idle --variants vLLM extent
done

env/bin/python "$bench/gpu_summary.py" --parts parts.tsv --backends backends.tsv --results "$out"
