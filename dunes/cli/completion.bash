# Written by .ci/completion_scripts.py; printed by dunes --completion.
[ -z "${ZSH_VERSION-}" ] || eval 'autoload -Uz compinit bashcompinit
(( $+functions[compdef] )) || compinit; bashcompinit'
_dunes() {
  local words= cur=${COMP_WORDS[COMP_CWORD]}
  case "${COMP_WORDS[*]:1:$((COMP_CWORD-1))} " in
    \ ) words='train finetune generate chat complete serve lsp doctor studio eval inspect convert export augment compile bench help' ;;
    help\ ) words='train finetune generate chat complete serve lsp doctor studio eval inspect convert export augment compile bench help checkpoints coming-from command completion-figures completion decisions editors figures finetuning-data finetuning format generating how-completion-works how-compression-works how-measuring-works how-mixtures-work how-scaling-works how-training-works index instruction-data kv-cache measuring mixtures-and-expansion model-formats native networks operation-checks operations performance preferences pruning quantization scaling serving small-networks studio training-data training-loop training-options training tutorial' ;;
    train\ *--split\ ) words='files tails' ;;
    train\ *--family\ ) words='arcee dunes llama mistral phi3 mixtral qwen2 qwen3 qwen3_moe deepseek_v3 olmo2 gemma2 gemma3_text smollm3 gpt_oss gpt_neox stablelm gpt2 mamba2 qwen3_next' ;;
    train\ *--balancing\ ) words='loss bias' ;;
    train\ *--tokenizer\ ) words='bpe bytes chars' ;;
    train\ *--copies\ ) words='auto never only' ;;
    train\ *--device\ ) words='cpu cuda mps' ;;
    train\ *--compile\ ) words='auto on off' ;;
    train\ *--dtype\ ) words='float32 bfloat16 float16' ;;
    train\ *--shard\ ) words='all node' ;;
    train\ *) [[ $cur == -* ]] && words='--text-field --split --separate-documents --follow-links --from --trainable --family --parts --experts --experts-per-token --shared-experts --balancing --size --tokenizer --vocab-size --complete --fim-rate --copies --dropout --weight-decay --minutes --steps --batch --context-length --lr --seed --optimizer --lr-factors --device --compile --dtype --threads --resume --override --dry-run --strict --profile --track --rank-timeout --shard --out --no-complete --plan --quiet --trust-code --trust-sources --help' ;;
    finetune\ *--template\ ) words='plain alpaca alpaca-newline mistral llama2 llama3 chatml' ;;
    finetune\ *--train-on\ ) words='answers all' ;;
    finetune\ *--method\ ) words='full lora rslora dora pissa qlora qdora qlora-int8 lora-experts' ;;
    finetune\ *--router\ ) words='linear shared mlp' ;;
    finetune\ *--objective\ ) words='sft dpo orpo' ;;
    finetune\ *--device\ ) words='cpu cuda mps' ;;
    finetune\ *--compile\ ) words='auto on off' ;;
    finetune\ *--dtype\ ) words='float32 bfloat16 float16' ;;
    finetune\ *--shard\ ) words='all node' ;;
    finetune\ *) [[ $cur == -* ]] && words='--data --text-field --fields --follow-links --template --train-on --val-data --val-fraction --forgetting-data --max-truncated --no-packing --method --target-modules --rank --alpha --ranks --dropout --experts --experts-per-token --router --objective --beta --label-smoothing --length-normalized --minutes --steps --batch --context-length --lr --seed --epochs --micro-batch --device --compile --dtype --threads --resume --override --dry-run --strict --profile --track --rank-timeout --shard --out --show --quiet --trust-code --trust-sources --help' ;;
    generate\ *--cache\ ) words='int8 int4 int2' ;;
    generate\ *) [[ $cur == -* ]] && words='--max-tokens --temperature --top-k --top-p --min-p --typical-p --repetition-penalty --seed --lookup --draft --cache --any-base --trust-code --trust-sources --help' ;;
    chat\ *--cache\ ) words='int8 int4 int2' ;;
    chat\ *) [[ $cur == -* ]] && words='--max-tokens --temperature --top-k --top-p --min-p --typical-p --repetition-penalty --seed --adapter --system --cache --any-base --trust-code --trust-sources --help' ;;
    complete\ *) [[ $cur == -* ]] && words='--json --any-base --trust-code --trust-sources --help' ;;
    serve\ *--config\ ) words='vim nvim vscode zed emacs helix' ;;
    serve\ *) [[ $cur == -* ]] && words='--host --port --allow-host --adapter --acceptance --ollama --no-follow --config --trust-code --trust-sources --help' ;;
    lsp\ *) [[ $cur == -* ]] && words='--acceptance --no-follow --trust-code --trust-sources --help' ;;
    doctor\ *) [[ $cur == -* ]] && words='--file --help' ;;
    studio\ *) [[ $cur == -* ]] && words='--host --port --allow-host --trust-code --trust-sources --help' ;;
    eval\ *) [[ $cur == -* ]] && words='--text-field --fields --follow-links --tasks --task-folder --limit --completion --lines --all-lines --out --any-base --trust-code --trust-sources --help' ;;
    inspect\ *) [[ $cur == -* ]] && words='--values --layers --example --trust-code --trust-sources --help' ;;
    convert\ *--dtype\ ) words='float32 bfloat16 float16' ;;
    convert\ *) [[ $cur == -* ]] && words='--dtype --names --trust-code --trust-sources --help' ;;
    export\ *--dtype\ ) words='float32 bfloat16 float16 q8_0 q4_0' ;;
    export\ *) [[ $cur == -* ]] && words='--to --dtype --example --trust-code --trust-sources --help' ;;
    augment\ ) words='merge expand narrow prune quantize upcycle experts lora-experts' ;;
    augment\ merge\ *--into\ ) words='dequantized original' ;;
    augment\ merge\ *--dtype\ ) words='float32 bfloat16 float16' ;;
    augment\ merge\ *) [[ $cur == -* ]] && words='--into --dtype --any-base --trust-code --trust-sources --help' ;;
    augment\ expand\ *) [[ $cur == -* ]] && words='--blocks --after --undo --trust-code --trust-sources --help' ;;
    augment\ narrow\ *) [[ $cur == -* ]] && words='--heads --neurons --experts --blocks --uneven --calibration --validation --trust-code --trust-sources --help' ;;
    augment\ prune\ *--method\ ) words='sparsegpt wanda magnitude' ;;
    augment\ prune\ *) [[ $cur == -* ]] && words='--method --sparsity --pattern --target-modules --calibration --validation --trust-code --trust-sources --help' ;;
    augment\ quantize\ *--kind\ ) words='int8 int4 int3 nf4' ;;
    augment\ quantize\ *--method\ ) words='rtn gptq' ;;
    augment\ quantize\ *) [[ $cur == -* ]] && words='--target-modules --kind --double --method --group --symmetric --no-act-order --override --calibration --validation --trust-code --trust-sources --help' ;;
    augment\ upcycle\ *) [[ $cur == -* ]] && words='--experts --top-k --granularity --drop --seed --trust-code --trust-sources --help' ;;
    augment\ experts\ *--split\ ) words='random cluster importance' ;;
    augment\ experts\ *--gate\ ) words='linear noisy' ;;
    augment\ experts\ *--scale\ ) words='unbiased official' ;;
    augment\ experts\ *) [[ $cur == -* ]] && words='--experts --top-k --shared --split --gate --scale --seed --calibration --undo --trust-code --trust-sources --help' ;;
    augment\ lora-experts\ *--router\ ) words='linear shared mlp' ;;
    augment\ lora-experts\ *) [[ $cur == -* ]] && words='--target-modules --router --experts --top-k --rank --alpha --seed --trust-code --trust-sources --help' ;;
    compile\ *--dtype\ ) words='float32 bfloat16 float16' ;;
    compile\ *) [[ $cur == -* ]] && words='--dtype --any-base --trust-code --trust-sources --help' ;;
    bench\ ) words='train prefill decode score complete tokenize load save memory compare plot' ;;
    bench\ train\ *) [[ $cur == -* ]] && words='--size --family --batch --context-length --dtype --threads --compile --rounds --out --by-module --picture --json --trust-code --trust-sources --help' ;;
    bench\ prefill\ *) [[ $cur == -* ]] && words='--size --family --batch --context-length --dtype --threads --compile --rounds --out --by-module --picture --json --trust-code --trust-sources --help' ;;
    bench\ decode\ *) [[ $cur == -* ]] && words='--size --family --batch --context-length --dtype --threads --compile --rounds --out --by-module --picture --json --trust-code --trust-sources --help' ;;
    bench\ score\ *) [[ $cur == -* ]] && words='--size --family --batch --context-length --dtype --threads --compile --rounds --out --by-module --picture --json --trust-code --trust-sources --help' ;;
    bench\ complete\ *) [[ $cur == -* ]] && words='--size --family --batch --context-length --dtype --threads --compile --rounds --out --by-module --picture --json --trust-code --trust-sources --help' ;;
    bench\ tokenize\ *) [[ $cur == -* ]] && words='--size --family --batch --context-length --dtype --threads --compile --rounds --out --by-module --picture --json --trust-code --trust-sources --help' ;;
    bench\ load\ *) [[ $cur == -* ]] && words='--size --family --batch --context-length --dtype --threads --compile --rounds --out --by-module --picture --json --trust-code --trust-sources --help' ;;
    bench\ save\ *) [[ $cur == -* ]] && words='--size --family --batch --context-length --dtype --threads --compile --rounds --out --by-module --picture --json --trust-code --trust-sources --help' ;;
    bench\ memory\ *) [[ $cur == -* ]] && words='--size --family --batch --context-length --dtype --checkpointing --inference --check --picture --json --trust-code --trust-sources --help' ;;
    bench\ compare\ *) [[ $cur == -* ]] && words='--confidence --json --help' ;;
    bench\ plot\ *) [[ $cur == -* ]] && words='--out --json --help' ;;
    help\ *) [[ $cur == -* ]] && words='--help' ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _dunes dunes
