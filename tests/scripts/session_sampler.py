"""A data set dealt by the session's sampler over two epochs."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from trial import batch, join, keep, keep_loss, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    data = TensorDataset(*batch(0, 32))
    loader = DataLoader(data, batch_size=8 // session.world, sampler=session.sampler(data, seed=0))
    for _ in range(2):
        for x, y in session.epoch_of(loader):
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            keep_loss(loss)
    keep(session, model=model)
