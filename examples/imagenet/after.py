"""Train an image classifier: the usual script. `torchrun --nproc-per-node 2 THIS_FILE DATA --epochs 2`."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models
from torchvision import transforms as T

import memfeed
import memfeed.transforms as M

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class AverageMeter:
    """Keep a sum and a count of a value."""

    def __init__(self, name: str) -> None:
        self.name, self.total, self.count = name, 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.total, self.count = self.total + value * n, self.count + n

    def __str__(self) -> str:
        return f"{self.name} {self.total / max(self.count, 1):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--print-freq", type=int, default=10)
    args = parser.parse_args()

    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"

    to_tensor = [T.ToTensor(), T.Normalize(MEAN, STD)]
    augment = M.Compose([M.RandomResizedCrop(args.size), M.RandomHorizontalFlip(), M.Normalize(MEAN, STD)])
    enlarge = T.Compose([T.Resize((args.size * 8 // 7, args.size * 8 // 7)), T.PILToTensor()])
    resize = T.Compose([T.Resize((args.size, args.size)), *to_tensor])
    train_loader, train_sampler = make_loader(args.data / "train", enlarge, True, args, augment)
    val_loader, _ = make_loader(args.data / "val", resize, False, args)

    model = models.get_model(args.arch, num_classes=args.classes).to(device)
    model = DistributedDataParallel(model) if distributed else model
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    for epoch in range(args.epochs):
        if distributed:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, optimizer, epoch, device, args)
        accuracy = validate(val_loader, model, device)
        if not distributed or dist.get_rank() == 0:
            print(f"epoch {epoch}: {accuracy} of {len(val_loader.dataset)} images")
    if distributed:
        dist.destroy_process_group()


def make_loader(folder, transform, shuffle, args, augment=None):
    dataset = memfeed.cache(datasets.ImageFolder(folder, transform), folder.with_suffix(".mf"))
    sampler = DistributedSampler(dataset, shuffle=shuffle) if dist.is_initialized() else None
    workers = {"num_workers": args.workers, "pin_memory": True, "transform": augment}
    loader = memfeed.Loader(dataset, args.batch_size, shuffle=shuffle and sampler is None, sampler=sampler, **workers)
    return loader, sampler


def train(train_loader, model, optimizer, epoch, device, args) -> None:
    batch_time, losses = AverageMeter("seconds"), AverageMeter("loss")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        loss = torch.nn.functional.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), images.size(0))
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            print(f"epoch {epoch} [{i}/{len(train_loader)}] {batch_time} {losses}")


@torch.no_grad()
def validate(val_loader, model, device) -> AverageMeter:
    top1 = AverageMeter("accuracy")
    model.eval()
    for images, target in val_loader:
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        right = (model(images).argmax(1) == target).float().mean()
        top1.update(right.item(), images.size(0))
    if dist.is_initialized():
        total = torch.tensor([top1.total, top1.count], dtype=torch.float64, device=device)
        dist.all_reduce(total)
        top1.total, top1.count = total.tolist()
    return top1


if __name__ == "__main__":
    main()
