# SPDX-License-Identifier: Apache-2.0
"""Gates: what a quantized cache does to a real model, measured token by token.

    python -m nybble.gate --model smollm2 --bits 4 --json gate.json --plot gate.png

A model reads a prompt and is then forced along the text, token by token: with transformers' own
cache and attention, with the quantized cache on nybble's compat path (the steps spelled out), and
on the fused path. The gates hold the fused path to the compat path; what the quantization itself
costs is reported beside it. docs/python.md has the rest.
"""
