"""The loop of the DCGAN tutorial, with both networks in one nn.ModuleList and a list of their optimizers."""

# asked: put both into one nn.ModuleList
import torch
from torch import nn
from trial import drawn, join, keep, keep_loss, mine

with join() as session:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d
    netg = nn.Sequential(up(8, 24, 4), nn.ReLU(), up(24, 1, 4, 2, 1), nn.Tanh()).double()
    netd = nn.Sequential(
        nn.Conv2d(1, 24, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(24, 1, 4), nn.Sigmoid()
    ).double()
    optimizerd = torch.optim.Adam(netd.parameters(), lr=0.002, betas=(0.5, 0.999))
    optimizerg = torch.optim.Adam(netg.parameters(), lr=0.002, betas=(0.5, 0.999))
    session.prepare(nn.ModuleList([netd, netg]), [optimizerd, optimizerg])
    criterion = nn.BCELoss()
    for step in range(4):
        netd.zero_grad()
        real = mine(session, drawn(2 * step, 8, 64)).view(-1, 1, 8, 8)
        label = torch.full((len(real),), 1.0, dtype=torch.float64)
        of_real = criterion(netd(real).view(-1), label)
        of_real.backward()
        noise = mine(session, drawn(2 * step + 1, 8, 8)).view(-1, 8, 1, 1)
        fake = netg(noise)
        label.fill_(0.0)
        of_fake = criterion(netd(fake.detach()).view(-1), label)
        of_fake.backward()
        optimizerd.step()
        netg.zero_grad()
        label.fill_(1.0)
        cheat = criterion(netd(fake).view(-1), label)
        cheat.backward()
        optimizerg.step()
        keep_loss(of_real + of_fake + cheat)
    keep(session, netg=netg, netd=netd)
