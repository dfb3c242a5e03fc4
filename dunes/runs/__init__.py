"""Training and finetuning of models, and changes to saved models: configs, sizes, loops, metrics, pictures.

Start with `train.train` and its `train_config.TrainConfig`, `finetune.finetune` and its
`finetune_config.FinetuneConfig`, `augment.augment_folder`, and `saving.read_metrics`.
"""
