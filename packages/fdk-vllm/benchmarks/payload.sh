#!/usr/bin/env bash
# Packs vLLM 0.25.0 for an offline GPU machine with Python 3.12, torch 2.11, triton and transformers:
# three folders of less than 58 MB, which are carried one at a time.
#   payload.sh OUT        then, on the machine:
#   cat OUT/1/part.* OUT/2/part.* | tar xJ -C x; tar xJf OUT/3/dependencies.txz -C d
#   PYTHONPATH=x:d:SOURCES python3 serving.py       SOURCES: the src folders of fdk's packages
# Left out: FlashAttention 2 (Hopper takes 3), deep_gemm, and the Rust front end. Structured output
# is not used: two stand-ins take the place of 120 MB.
set -euo pipefail
out=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 -d "$work" vllm==0.25.0
mkdir -p "$work/x" "$out"/{1,2,3}
python3 -m zipfile -e "$work"/vllm-*.whl "$work/x"
rm -rf "$work"/x/vllm/{vllm-rs,vllm_flash_attn/_vllm_fa2_C.abi3.so,third_party/fmha_sm100,third_party/deep_gemm}
# The plug-in is found by its entry point, which a source folder has not.
mkdir -p "$work/x/fdk_vllm-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: fdk-vllm\nVersion: 0.1.0\n' >"$work/x/fdk_vllm-0.1.0.dist-info/METADATA"
printf '[vllm.general_plugins]\nfdk = fdk_vllm:register\n' >"$work/x/fdk_vllm-0.1.0.dist-info/entry_points.txt"
tar c -C "$work/x" . | xz -T2 -3 >"$work/vllm.txz" # 114 MB, four minutes on two busy cores
split -b 57000000 "$work/vllm.txz" "$work/part."
mv "$work/part.aa" "$out/1/"
mv "$work/part.ab" "$out/2/"
(cd "$work" && uv pip install -q --no-deps --python-version 3.12 --python-platform x86_64-manylinux_2_34 \
    --only-binary :all: --target d -r "$here/payload_requirements.txt")
rm -rf "$work"/d/{anthropic,pycountry/locales}
mkdir -p "$work/d/xgrammar"
printf 'class LLMatcher: pass\nclass LLTokenizer: pass\nclass LLInterpreter: pass\n' >"$work/d/llguidance.py"
printf 'def __getattr__(n):\n    if n.startswith("__"): raise AttributeError(n)\n    return type(n, (), {})\n' \
    >"$work/d/xgrammar/__init__.py"
tar c -C "$work/d" . | xz -T2 -1 >"$out/3/dependencies.txz" # 20 MB
du -sh "$out"/*
