# Written by .ci/completion_scripts.py; printed by dunes --completion.
function __dunes
  set -l words (commandline -opc)
  string match -q -- $argv[1] "$words[2..] "
end
complete -c dunes -n "__dunes ' '" -f -a 'train finetune generate chat complete serve lsp doctor studio eval inspect convert export augment compile bench help'
complete -c dunes -n "__dunes 'help '" -f -a 'train finetune generate chat complete serve lsp doctor studio eval inspect convert export augment compile bench help checkpoints coming-from command completion-figures completion decisions editors figures finetuning-data finetuning format generating how-completion-works how-compression-works how-measuring-works how-mixtures-work how-scaling-works how-training-works index instruction-data kv-cache measuring mixtures-and-expansion model-formats native networks operation-checks operations performance preferences pruning quantization scaling serving small-networks studio training-data training-loop training-options training tutorial'
complete -c dunes -n "__dunes 'train *--split '" -f -a 'files tails'
complete -c dunes -n "__dunes 'train *--family '" -f -a 'arcee dunes llama mistral phi3 mixtral qwen2 qwen3 qwen3_moe deepseek_v3 olmo2 gemma2 gemma3_text smollm3 gpt_oss gpt_neox stablelm gpt2 mamba2 qwen3_next'
complete -c dunes -n "__dunes 'train *--balancing '" -f -a 'loss bias'
complete -c dunes -n "__dunes 'train *--tokenizer '" -f -a 'bpe bytes chars'
complete -c dunes -n "__dunes 'train *--copies '" -f -a 'auto never only'
complete -c dunes -n "__dunes 'train *--device '" -f -a 'cpu cuda mps'
complete -c dunes -n "__dunes 'train *--compile '" -f -a 'auto on off'
complete -c dunes -n "__dunes 'train *--dtype '" -f -a 'float32 bfloat16 float16'
complete -c dunes -n "__dunes 'train *--shard '" -f -a 'all node'
complete -c dunes -n "__dunes 'train *'" -l text-field
complete -c dunes -n "__dunes 'train *'" -l split
complete -c dunes -n "__dunes 'train *'" -l separate-documents
complete -c dunes -n "__dunes 'train *'" -l follow-links
complete -c dunes -n "__dunes 'train *'" -l from
complete -c dunes -n "__dunes 'train *'" -l trainable
complete -c dunes -n "__dunes 'train *'" -l family
complete -c dunes -n "__dunes 'train *'" -l parts
complete -c dunes -n "__dunes 'train *'" -l experts
complete -c dunes -n "__dunes 'train *'" -l experts-per-token
complete -c dunes -n "__dunes 'train *'" -l shared-experts
complete -c dunes -n "__dunes 'train *'" -l balancing
complete -c dunes -n "__dunes 'train *'" -l size
complete -c dunes -n "__dunes 'train *'" -l tokenizer
complete -c dunes -n "__dunes 'train *'" -l vocab-size
complete -c dunes -n "__dunes 'train *'" -l complete
complete -c dunes -n "__dunes 'train *'" -l fim-rate
complete -c dunes -n "__dunes 'train *'" -l copies
complete -c dunes -n "__dunes 'train *'" -l dropout
complete -c dunes -n "__dunes 'train *'" -l weight-decay
complete -c dunes -n "__dunes 'train *'" -l minutes
complete -c dunes -n "__dunes 'train *'" -l steps
complete -c dunes -n "__dunes 'train *'" -l batch
complete -c dunes -n "__dunes 'train *'" -l context-length
complete -c dunes -n "__dunes 'train *'" -l lr
complete -c dunes -n "__dunes 'train *'" -l seed
complete -c dunes -n "__dunes 'train *'" -l optimizer
complete -c dunes -n "__dunes 'train *'" -l lr-factors
complete -c dunes -n "__dunes 'train *'" -l device
complete -c dunes -n "__dunes 'train *'" -l compile
complete -c dunes -n "__dunes 'train *'" -l dtype
complete -c dunes -n "__dunes 'train *'" -l threads
complete -c dunes -n "__dunes 'train *'" -l resume
complete -c dunes -n "__dunes 'train *'" -l override
complete -c dunes -n "__dunes 'train *'" -l dry-run
complete -c dunes -n "__dunes 'train *'" -l strict
complete -c dunes -n "__dunes 'train *'" -l profile
complete -c dunes -n "__dunes 'train *'" -l track
complete -c dunes -n "__dunes 'train *'" -l rank-timeout
complete -c dunes -n "__dunes 'train *'" -l shard
complete -c dunes -n "__dunes 'train *'" -l out
complete -c dunes -n "__dunes 'train *'" -l no-complete
complete -c dunes -n "__dunes 'train *'" -l plan
complete -c dunes -n "__dunes 'train *'" -l quiet
complete -c dunes -n "__dunes 'train *'" -l trust-code
complete -c dunes -n "__dunes 'train *'" -l trust-sources
complete -c dunes -n "__dunes 'train *'" -l help
complete -c dunes -n "__dunes 'finetune *--template '" -f -a 'plain alpaca alpaca-newline mistral llama2 llama3 chatml'
complete -c dunes -n "__dunes 'finetune *--train-on '" -f -a 'answers all'
complete -c dunes -n "__dunes 'finetune *--method '" -f -a 'full lora rslora dora pissa qlora qdora qlora-int8 lora-experts'
complete -c dunes -n "__dunes 'finetune *--router '" -f -a 'linear shared mlp'
complete -c dunes -n "__dunes 'finetune *--objective '" -f -a 'sft dpo orpo'
complete -c dunes -n "__dunes 'finetune *--device '" -f -a 'cpu cuda mps'
complete -c dunes -n "__dunes 'finetune *--compile '" -f -a 'auto on off'
complete -c dunes -n "__dunes 'finetune *--dtype '" -f -a 'float32 bfloat16 float16'
complete -c dunes -n "__dunes 'finetune *--shard '" -f -a 'all node'
complete -c dunes -n "__dunes 'finetune *'" -l data
complete -c dunes -n "__dunes 'finetune *'" -l text-field
complete -c dunes -n "__dunes 'finetune *'" -l fields
complete -c dunes -n "__dunes 'finetune *'" -l follow-links
complete -c dunes -n "__dunes 'finetune *'" -l template
complete -c dunes -n "__dunes 'finetune *'" -l train-on
complete -c dunes -n "__dunes 'finetune *'" -l val-data
complete -c dunes -n "__dunes 'finetune *'" -l val-fraction
complete -c dunes -n "__dunes 'finetune *'" -l forgetting-data
complete -c dunes -n "__dunes 'finetune *'" -l max-truncated
complete -c dunes -n "__dunes 'finetune *'" -l no-packing
complete -c dunes -n "__dunes 'finetune *'" -l method
complete -c dunes -n "__dunes 'finetune *'" -l target-modules
complete -c dunes -n "__dunes 'finetune *'" -l rank
complete -c dunes -n "__dunes 'finetune *'" -l alpha
complete -c dunes -n "__dunes 'finetune *'" -l ranks
complete -c dunes -n "__dunes 'finetune *'" -l dropout
complete -c dunes -n "__dunes 'finetune *'" -l experts
complete -c dunes -n "__dunes 'finetune *'" -l experts-per-token
complete -c dunes -n "__dunes 'finetune *'" -l router
complete -c dunes -n "__dunes 'finetune *'" -l objective
complete -c dunes -n "__dunes 'finetune *'" -l beta
complete -c dunes -n "__dunes 'finetune *'" -l label-smoothing
complete -c dunes -n "__dunes 'finetune *'" -l length-normalized
complete -c dunes -n "__dunes 'finetune *'" -l minutes
complete -c dunes -n "__dunes 'finetune *'" -l steps
complete -c dunes -n "__dunes 'finetune *'" -l batch
complete -c dunes -n "__dunes 'finetune *'" -l context-length
complete -c dunes -n "__dunes 'finetune *'" -l lr
complete -c dunes -n "__dunes 'finetune *'" -l seed
complete -c dunes -n "__dunes 'finetune *'" -l epochs
complete -c dunes -n "__dunes 'finetune *'" -l micro-batch
complete -c dunes -n "__dunes 'finetune *'" -l device
complete -c dunes -n "__dunes 'finetune *'" -l compile
complete -c dunes -n "__dunes 'finetune *'" -l dtype
complete -c dunes -n "__dunes 'finetune *'" -l threads
complete -c dunes -n "__dunes 'finetune *'" -l resume
complete -c dunes -n "__dunes 'finetune *'" -l override
complete -c dunes -n "__dunes 'finetune *'" -l dry-run
complete -c dunes -n "__dunes 'finetune *'" -l strict
complete -c dunes -n "__dunes 'finetune *'" -l profile
complete -c dunes -n "__dunes 'finetune *'" -l track
complete -c dunes -n "__dunes 'finetune *'" -l rank-timeout
complete -c dunes -n "__dunes 'finetune *'" -l shard
complete -c dunes -n "__dunes 'finetune *'" -l out
complete -c dunes -n "__dunes 'finetune *'" -l show
complete -c dunes -n "__dunes 'finetune *'" -l quiet
complete -c dunes -n "__dunes 'finetune *'" -l trust-code
complete -c dunes -n "__dunes 'finetune *'" -l trust-sources
complete -c dunes -n "__dunes 'finetune *'" -l help
complete -c dunes -n "__dunes 'generate *--cache '" -f -a 'int8 int4 int2'
complete -c dunes -n "__dunes 'generate *'" -l max-tokens
complete -c dunes -n "__dunes 'generate *'" -l temperature
complete -c dunes -n "__dunes 'generate *'" -l top-k
complete -c dunes -n "__dunes 'generate *'" -l top-p
complete -c dunes -n "__dunes 'generate *'" -l min-p
complete -c dunes -n "__dunes 'generate *'" -l typical-p
complete -c dunes -n "__dunes 'generate *'" -l repetition-penalty
complete -c dunes -n "__dunes 'generate *'" -l seed
complete -c dunes -n "__dunes 'generate *'" -l lookup
complete -c dunes -n "__dunes 'generate *'" -l draft
complete -c dunes -n "__dunes 'generate *'" -l cache
complete -c dunes -n "__dunes 'generate *'" -l any-base
complete -c dunes -n "__dunes 'generate *'" -l trust-code
complete -c dunes -n "__dunes 'generate *'" -l trust-sources
complete -c dunes -n "__dunes 'generate *'" -l help
complete -c dunes -n "__dunes 'chat *--cache '" -f -a 'int8 int4 int2'
complete -c dunes -n "__dunes 'chat *'" -l max-tokens
complete -c dunes -n "__dunes 'chat *'" -l temperature
complete -c dunes -n "__dunes 'chat *'" -l top-k
complete -c dunes -n "__dunes 'chat *'" -l top-p
complete -c dunes -n "__dunes 'chat *'" -l min-p
complete -c dunes -n "__dunes 'chat *'" -l typical-p
complete -c dunes -n "__dunes 'chat *'" -l repetition-penalty
complete -c dunes -n "__dunes 'chat *'" -l seed
complete -c dunes -n "__dunes 'chat *'" -l adapter
complete -c dunes -n "__dunes 'chat *'" -l system
complete -c dunes -n "__dunes 'chat *'" -l cache
complete -c dunes -n "__dunes 'chat *'" -l any-base
complete -c dunes -n "__dunes 'chat *'" -l trust-code
complete -c dunes -n "__dunes 'chat *'" -l trust-sources
complete -c dunes -n "__dunes 'chat *'" -l help
complete -c dunes -n "__dunes 'complete *'" -l json
complete -c dunes -n "__dunes 'complete *'" -l any-base
complete -c dunes -n "__dunes 'complete *'" -l trust-code
complete -c dunes -n "__dunes 'complete *'" -l trust-sources
complete -c dunes -n "__dunes 'complete *'" -l help
complete -c dunes -n "__dunes 'serve *--config '" -f -a 'vim nvim vscode zed emacs helix'
complete -c dunes -n "__dunes 'serve *'" -l host
complete -c dunes -n "__dunes 'serve *'" -l port
complete -c dunes -n "__dunes 'serve *'" -l allow-host
complete -c dunes -n "__dunes 'serve *'" -l adapter
complete -c dunes -n "__dunes 'serve *'" -l acceptance
complete -c dunes -n "__dunes 'serve *'" -l ollama
complete -c dunes -n "__dunes 'serve *'" -l no-follow
complete -c dunes -n "__dunes 'serve *'" -l config
complete -c dunes -n "__dunes 'serve *'" -l trust-code
complete -c dunes -n "__dunes 'serve *'" -l trust-sources
complete -c dunes -n "__dunes 'serve *'" -l help
complete -c dunes -n "__dunes 'lsp *'" -l acceptance
complete -c dunes -n "__dunes 'lsp *'" -l no-follow
complete -c dunes -n "__dunes 'lsp *'" -l trust-code
complete -c dunes -n "__dunes 'lsp *'" -l trust-sources
complete -c dunes -n "__dunes 'lsp *'" -l help
complete -c dunes -n "__dunes 'doctor *'" -l file
complete -c dunes -n "__dunes 'doctor *'" -l help
complete -c dunes -n "__dunes 'studio *'" -l host
complete -c dunes -n "__dunes 'studio *'" -l port
complete -c dunes -n "__dunes 'studio *'" -l allow-host
complete -c dunes -n "__dunes 'studio *'" -l trust-code
complete -c dunes -n "__dunes 'studio *'" -l trust-sources
complete -c dunes -n "__dunes 'studio *'" -l help
complete -c dunes -n "__dunes 'eval *'" -l text-field
complete -c dunes -n "__dunes 'eval *'" -l fields
complete -c dunes -n "__dunes 'eval *'" -l follow-links
complete -c dunes -n "__dunes 'eval *'" -l tasks
complete -c dunes -n "__dunes 'eval *'" -l task-folder
complete -c dunes -n "__dunes 'eval *'" -l limit
complete -c dunes -n "__dunes 'eval *'" -l completion
complete -c dunes -n "__dunes 'eval *'" -l lines
complete -c dunes -n "__dunes 'eval *'" -l all-lines
complete -c dunes -n "__dunes 'eval *'" -l out
complete -c dunes -n "__dunes 'eval *'" -l any-base
complete -c dunes -n "__dunes 'eval *'" -l trust-code
complete -c dunes -n "__dunes 'eval *'" -l trust-sources
complete -c dunes -n "__dunes 'eval *'" -l help
complete -c dunes -n "__dunes 'inspect *'" -l values
complete -c dunes -n "__dunes 'inspect *'" -l layers
complete -c dunes -n "__dunes 'inspect *'" -l example
complete -c dunes -n "__dunes 'inspect *'" -l trust-code
complete -c dunes -n "__dunes 'inspect *'" -l trust-sources
complete -c dunes -n "__dunes 'inspect *'" -l help
complete -c dunes -n "__dunes 'convert *--dtype '" -f -a 'float32 bfloat16 float16'
complete -c dunes -n "__dunes 'convert *'" -l dtype
complete -c dunes -n "__dunes 'convert *'" -l names
complete -c dunes -n "__dunes 'convert *'" -l trust-code
complete -c dunes -n "__dunes 'convert *'" -l trust-sources
complete -c dunes -n "__dunes 'convert *'" -l help
complete -c dunes -n "__dunes 'export *--dtype '" -f -a 'float32 bfloat16 float16 q8_0 q4_0'
complete -c dunes -n "__dunes 'export *'" -l to
complete -c dunes -n "__dunes 'export *'" -l dtype
complete -c dunes -n "__dunes 'export *'" -l example
complete -c dunes -n "__dunes 'export *'" -l trust-code
complete -c dunes -n "__dunes 'export *'" -l trust-sources
complete -c dunes -n "__dunes 'export *'" -l help
complete -c dunes -n "__dunes 'augment '" -f -a 'merge expand narrow prune quantize upcycle experts lora-experts'
complete -c dunes -n "__dunes 'augment merge *--into '" -f -a 'dequantized original'
complete -c dunes -n "__dunes 'augment merge *--dtype '" -f -a 'float32 bfloat16 float16'
complete -c dunes -n "__dunes 'augment merge *'" -l into
complete -c dunes -n "__dunes 'augment merge *'" -l dtype
complete -c dunes -n "__dunes 'augment merge *'" -l any-base
complete -c dunes -n "__dunes 'augment merge *'" -l trust-code
complete -c dunes -n "__dunes 'augment merge *'" -l trust-sources
complete -c dunes -n "__dunes 'augment merge *'" -l help
complete -c dunes -n "__dunes 'augment expand *'" -l blocks
complete -c dunes -n "__dunes 'augment expand *'" -l after
complete -c dunes -n "__dunes 'augment expand *'" -l undo
complete -c dunes -n "__dunes 'augment expand *'" -l trust-code
complete -c dunes -n "__dunes 'augment expand *'" -l trust-sources
complete -c dunes -n "__dunes 'augment expand *'" -l help
complete -c dunes -n "__dunes 'augment narrow *'" -l heads
complete -c dunes -n "__dunes 'augment narrow *'" -l neurons
complete -c dunes -n "__dunes 'augment narrow *'" -l experts
complete -c dunes -n "__dunes 'augment narrow *'" -l blocks
complete -c dunes -n "__dunes 'augment narrow *'" -l uneven
complete -c dunes -n "__dunes 'augment narrow *'" -l calibration
complete -c dunes -n "__dunes 'augment narrow *'" -l validation
complete -c dunes -n "__dunes 'augment narrow *'" -l trust-code
complete -c dunes -n "__dunes 'augment narrow *'" -l trust-sources
complete -c dunes -n "__dunes 'augment narrow *'" -l help
complete -c dunes -n "__dunes 'augment prune *--method '" -f -a 'sparsegpt wanda magnitude'
complete -c dunes -n "__dunes 'augment prune *'" -l method
complete -c dunes -n "__dunes 'augment prune *'" -l sparsity
complete -c dunes -n "__dunes 'augment prune *'" -l pattern
complete -c dunes -n "__dunes 'augment prune *'" -l target-modules
complete -c dunes -n "__dunes 'augment prune *'" -l calibration
complete -c dunes -n "__dunes 'augment prune *'" -l validation
complete -c dunes -n "__dunes 'augment prune *'" -l trust-code
complete -c dunes -n "__dunes 'augment prune *'" -l trust-sources
complete -c dunes -n "__dunes 'augment prune *'" -l help
complete -c dunes -n "__dunes 'augment quantize *--kind '" -f -a 'int8 int4 int3 nf4'
complete -c dunes -n "__dunes 'augment quantize *--method '" -f -a 'rtn gptq'
complete -c dunes -n "__dunes 'augment quantize *'" -l target-modules
complete -c dunes -n "__dunes 'augment quantize *'" -l kind
complete -c dunes -n "__dunes 'augment quantize *'" -l double
complete -c dunes -n "__dunes 'augment quantize *'" -l method
complete -c dunes -n "__dunes 'augment quantize *'" -l group
complete -c dunes -n "__dunes 'augment quantize *'" -l symmetric
complete -c dunes -n "__dunes 'augment quantize *'" -l no-act-order
complete -c dunes -n "__dunes 'augment quantize *'" -l override
complete -c dunes -n "__dunes 'augment quantize *'" -l calibration
complete -c dunes -n "__dunes 'augment quantize *'" -l validation
complete -c dunes -n "__dunes 'augment quantize *'" -l trust-code
complete -c dunes -n "__dunes 'augment quantize *'" -l trust-sources
complete -c dunes -n "__dunes 'augment quantize *'" -l help
complete -c dunes -n "__dunes 'augment upcycle *'" -l experts
complete -c dunes -n "__dunes 'augment upcycle *'" -l top-k
complete -c dunes -n "__dunes 'augment upcycle *'" -l granularity
complete -c dunes -n "__dunes 'augment upcycle *'" -l drop
complete -c dunes -n "__dunes 'augment upcycle *'" -l seed
complete -c dunes -n "__dunes 'augment upcycle *'" -l trust-code
complete -c dunes -n "__dunes 'augment upcycle *'" -l trust-sources
complete -c dunes -n "__dunes 'augment upcycle *'" -l help
complete -c dunes -n "__dunes 'augment experts *--split '" -f -a 'random cluster importance'
complete -c dunes -n "__dunes 'augment experts *--gate '" -f -a 'linear noisy'
complete -c dunes -n "__dunes 'augment experts *--scale '" -f -a 'unbiased official'
complete -c dunes -n "__dunes 'augment experts *'" -l experts
complete -c dunes -n "__dunes 'augment experts *'" -l top-k
complete -c dunes -n "__dunes 'augment experts *'" -l shared
complete -c dunes -n "__dunes 'augment experts *'" -l split
complete -c dunes -n "__dunes 'augment experts *'" -l gate
complete -c dunes -n "__dunes 'augment experts *'" -l scale
complete -c dunes -n "__dunes 'augment experts *'" -l seed
complete -c dunes -n "__dunes 'augment experts *'" -l calibration
complete -c dunes -n "__dunes 'augment experts *'" -l undo
complete -c dunes -n "__dunes 'augment experts *'" -l trust-code
complete -c dunes -n "__dunes 'augment experts *'" -l trust-sources
complete -c dunes -n "__dunes 'augment experts *'" -l help
complete -c dunes -n "__dunes 'augment lora-experts *--router '" -f -a 'linear shared mlp'
complete -c dunes -n "__dunes 'augment lora-experts *'" -l target-modules
complete -c dunes -n "__dunes 'augment lora-experts *'" -l router
complete -c dunes -n "__dunes 'augment lora-experts *'" -l experts
complete -c dunes -n "__dunes 'augment lora-experts *'" -l top-k
complete -c dunes -n "__dunes 'augment lora-experts *'" -l rank
complete -c dunes -n "__dunes 'augment lora-experts *'" -l alpha
complete -c dunes -n "__dunes 'augment lora-experts *'" -l seed
complete -c dunes -n "__dunes 'augment lora-experts *'" -l trust-code
complete -c dunes -n "__dunes 'augment lora-experts *'" -l trust-sources
complete -c dunes -n "__dunes 'augment lora-experts *'" -l help
complete -c dunes -n "__dunes 'compile *--dtype '" -f -a 'float32 bfloat16 float16'
complete -c dunes -n "__dunes 'compile *'" -l dtype
complete -c dunes -n "__dunes 'compile *'" -l any-base
complete -c dunes -n "__dunes 'compile *'" -l trust-code
complete -c dunes -n "__dunes 'compile *'" -l trust-sources
complete -c dunes -n "__dunes 'compile *'" -l help
complete -c dunes -n "__dunes 'bench '" -f -a 'train prefill decode score complete tokenize load save memory compare plot'
complete -c dunes -n "__dunes 'bench train *'" -l size
complete -c dunes -n "__dunes 'bench train *'" -l family
complete -c dunes -n "__dunes 'bench train *'" -l batch
complete -c dunes -n "__dunes 'bench train *'" -l context-length
complete -c dunes -n "__dunes 'bench train *'" -l dtype
complete -c dunes -n "__dunes 'bench train *'" -l threads
complete -c dunes -n "__dunes 'bench train *'" -l compile
complete -c dunes -n "__dunes 'bench train *'" -l rounds
complete -c dunes -n "__dunes 'bench train *'" -l out
complete -c dunes -n "__dunes 'bench train *'" -l by-module
complete -c dunes -n "__dunes 'bench train *'" -l picture
complete -c dunes -n "__dunes 'bench train *'" -l json
complete -c dunes -n "__dunes 'bench train *'" -l trust-code
complete -c dunes -n "__dunes 'bench train *'" -l trust-sources
complete -c dunes -n "__dunes 'bench train *'" -l help
complete -c dunes -n "__dunes 'bench prefill *'" -l size
complete -c dunes -n "__dunes 'bench prefill *'" -l family
complete -c dunes -n "__dunes 'bench prefill *'" -l batch
complete -c dunes -n "__dunes 'bench prefill *'" -l context-length
complete -c dunes -n "__dunes 'bench prefill *'" -l dtype
complete -c dunes -n "__dunes 'bench prefill *'" -l threads
complete -c dunes -n "__dunes 'bench prefill *'" -l compile
complete -c dunes -n "__dunes 'bench prefill *'" -l rounds
complete -c dunes -n "__dunes 'bench prefill *'" -l out
complete -c dunes -n "__dunes 'bench prefill *'" -l by-module
complete -c dunes -n "__dunes 'bench prefill *'" -l picture
complete -c dunes -n "__dunes 'bench prefill *'" -l json
complete -c dunes -n "__dunes 'bench prefill *'" -l trust-code
complete -c dunes -n "__dunes 'bench prefill *'" -l trust-sources
complete -c dunes -n "__dunes 'bench prefill *'" -l help
complete -c dunes -n "__dunes 'bench decode *'" -l size
complete -c dunes -n "__dunes 'bench decode *'" -l family
complete -c dunes -n "__dunes 'bench decode *'" -l batch
complete -c dunes -n "__dunes 'bench decode *'" -l context-length
complete -c dunes -n "__dunes 'bench decode *'" -l dtype
complete -c dunes -n "__dunes 'bench decode *'" -l threads
complete -c dunes -n "__dunes 'bench decode *'" -l compile
complete -c dunes -n "__dunes 'bench decode *'" -l rounds
complete -c dunes -n "__dunes 'bench decode *'" -l out
complete -c dunes -n "__dunes 'bench decode *'" -l by-module
complete -c dunes -n "__dunes 'bench decode *'" -l picture
complete -c dunes -n "__dunes 'bench decode *'" -l json
complete -c dunes -n "__dunes 'bench decode *'" -l trust-code
complete -c dunes -n "__dunes 'bench decode *'" -l trust-sources
complete -c dunes -n "__dunes 'bench decode *'" -l help
complete -c dunes -n "__dunes 'bench score *'" -l size
complete -c dunes -n "__dunes 'bench score *'" -l family
complete -c dunes -n "__dunes 'bench score *'" -l batch
complete -c dunes -n "__dunes 'bench score *'" -l context-length
complete -c dunes -n "__dunes 'bench score *'" -l dtype
complete -c dunes -n "__dunes 'bench score *'" -l threads
complete -c dunes -n "__dunes 'bench score *'" -l compile
complete -c dunes -n "__dunes 'bench score *'" -l rounds
complete -c dunes -n "__dunes 'bench score *'" -l out
complete -c dunes -n "__dunes 'bench score *'" -l by-module
complete -c dunes -n "__dunes 'bench score *'" -l picture
complete -c dunes -n "__dunes 'bench score *'" -l json
complete -c dunes -n "__dunes 'bench score *'" -l trust-code
complete -c dunes -n "__dunes 'bench score *'" -l trust-sources
complete -c dunes -n "__dunes 'bench score *'" -l help
complete -c dunes -n "__dunes 'bench complete *'" -l size
complete -c dunes -n "__dunes 'bench complete *'" -l family
complete -c dunes -n "__dunes 'bench complete *'" -l batch
complete -c dunes -n "__dunes 'bench complete *'" -l context-length
complete -c dunes -n "__dunes 'bench complete *'" -l dtype
complete -c dunes -n "__dunes 'bench complete *'" -l threads
complete -c dunes -n "__dunes 'bench complete *'" -l compile
complete -c dunes -n "__dunes 'bench complete *'" -l rounds
complete -c dunes -n "__dunes 'bench complete *'" -l out
complete -c dunes -n "__dunes 'bench complete *'" -l by-module
complete -c dunes -n "__dunes 'bench complete *'" -l picture
complete -c dunes -n "__dunes 'bench complete *'" -l json
complete -c dunes -n "__dunes 'bench complete *'" -l trust-code
complete -c dunes -n "__dunes 'bench complete *'" -l trust-sources
complete -c dunes -n "__dunes 'bench complete *'" -l help
complete -c dunes -n "__dunes 'bench tokenize *'" -l size
complete -c dunes -n "__dunes 'bench tokenize *'" -l family
complete -c dunes -n "__dunes 'bench tokenize *'" -l batch
complete -c dunes -n "__dunes 'bench tokenize *'" -l context-length
complete -c dunes -n "__dunes 'bench tokenize *'" -l dtype
complete -c dunes -n "__dunes 'bench tokenize *'" -l threads
complete -c dunes -n "__dunes 'bench tokenize *'" -l compile
complete -c dunes -n "__dunes 'bench tokenize *'" -l rounds
complete -c dunes -n "__dunes 'bench tokenize *'" -l out
complete -c dunes -n "__dunes 'bench tokenize *'" -l by-module
complete -c dunes -n "__dunes 'bench tokenize *'" -l picture
complete -c dunes -n "__dunes 'bench tokenize *'" -l json
complete -c dunes -n "__dunes 'bench tokenize *'" -l trust-code
complete -c dunes -n "__dunes 'bench tokenize *'" -l trust-sources
complete -c dunes -n "__dunes 'bench tokenize *'" -l help
complete -c dunes -n "__dunes 'bench load *'" -l size
complete -c dunes -n "__dunes 'bench load *'" -l family
complete -c dunes -n "__dunes 'bench load *'" -l batch
complete -c dunes -n "__dunes 'bench load *'" -l context-length
complete -c dunes -n "__dunes 'bench load *'" -l dtype
complete -c dunes -n "__dunes 'bench load *'" -l threads
complete -c dunes -n "__dunes 'bench load *'" -l compile
complete -c dunes -n "__dunes 'bench load *'" -l rounds
complete -c dunes -n "__dunes 'bench load *'" -l out
complete -c dunes -n "__dunes 'bench load *'" -l by-module
complete -c dunes -n "__dunes 'bench load *'" -l picture
complete -c dunes -n "__dunes 'bench load *'" -l json
complete -c dunes -n "__dunes 'bench load *'" -l trust-code
complete -c dunes -n "__dunes 'bench load *'" -l trust-sources
complete -c dunes -n "__dunes 'bench load *'" -l help
complete -c dunes -n "__dunes 'bench save *'" -l size
complete -c dunes -n "__dunes 'bench save *'" -l family
complete -c dunes -n "__dunes 'bench save *'" -l batch
complete -c dunes -n "__dunes 'bench save *'" -l context-length
complete -c dunes -n "__dunes 'bench save *'" -l dtype
complete -c dunes -n "__dunes 'bench save *'" -l threads
complete -c dunes -n "__dunes 'bench save *'" -l compile
complete -c dunes -n "__dunes 'bench save *'" -l rounds
complete -c dunes -n "__dunes 'bench save *'" -l out
complete -c dunes -n "__dunes 'bench save *'" -l by-module
complete -c dunes -n "__dunes 'bench save *'" -l picture
complete -c dunes -n "__dunes 'bench save *'" -l json
complete -c dunes -n "__dunes 'bench save *'" -l trust-code
complete -c dunes -n "__dunes 'bench save *'" -l trust-sources
complete -c dunes -n "__dunes 'bench save *'" -l help
complete -c dunes -n "__dunes 'bench memory *'" -l size
complete -c dunes -n "__dunes 'bench memory *'" -l family
complete -c dunes -n "__dunes 'bench memory *'" -l batch
complete -c dunes -n "__dunes 'bench memory *'" -l context-length
complete -c dunes -n "__dunes 'bench memory *'" -l dtype
complete -c dunes -n "__dunes 'bench memory *'" -l checkpointing
complete -c dunes -n "__dunes 'bench memory *'" -l inference
complete -c dunes -n "__dunes 'bench memory *'" -l check
complete -c dunes -n "__dunes 'bench memory *'" -l picture
complete -c dunes -n "__dunes 'bench memory *'" -l json
complete -c dunes -n "__dunes 'bench memory *'" -l trust-code
complete -c dunes -n "__dunes 'bench memory *'" -l trust-sources
complete -c dunes -n "__dunes 'bench memory *'" -l help
complete -c dunes -n "__dunes 'bench compare *'" -l confidence
complete -c dunes -n "__dunes 'bench compare *'" -l json
complete -c dunes -n "__dunes 'bench compare *'" -l help
complete -c dunes -n "__dunes 'bench plot *'" -l out
complete -c dunes -n "__dunes 'bench plot *'" -l json
complete -c dunes -n "__dunes 'bench plot *'" -l help
complete -c dunes -n "__dunes 'help *'" -l help
