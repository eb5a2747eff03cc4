"""Parts of a training run: settings, mixture, dataloader, optim, schedule, evaluate, checkpoint, logger."""
