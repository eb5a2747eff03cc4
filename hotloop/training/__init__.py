"""Parts of a training run: dataloader, optim, schedule, evaluate, checkpoint, logger, report, shard."""
