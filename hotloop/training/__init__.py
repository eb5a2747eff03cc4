"""Parts of a training run: settings, dataloader, optim, schedule, evaluate, checkpoint, logger."""
