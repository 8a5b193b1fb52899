"""A data set dealt by the session's sampler, whose batches two processes of a DataLoader fetch ahead."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from trial import batch, join, keep, keep_loss, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    data, size = TensorDataset(*batch(0, 32)), 8 // session.world
    ahead = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(data, batch_size=size, sampler=session.sampler(data, seed=0), **ahead)
    for _ in range(2):
        for x, y in session.epoch_of(loader):
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            keep_loss(loss)
    keep(session, model=model)
