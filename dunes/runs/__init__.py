"""Train or finetune a model, or change the model in a folder: configs, sizes, loops, metrics, plots.

Start with `train.train` and its `train_config.TrainConfig`, `finetune.finetune` and its
`finetune_config.FinetuneConfig`, `augment.augment_folder`, and `run.read_metrics`.
"""
