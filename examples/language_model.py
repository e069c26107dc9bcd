"""A Hugging Face tokenizer and model, trained on packed documents (Python's own source files), killed and resumed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import memfeed

BLOCK, BATCH_SIZE, EPOCHS, KILLED_AT = 64, 8, 2, 14
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def prepare(folder: Path) -> None:
    texts = [path.read_text(errors="ignore")[:2500] for path in sorted(Path(os.__file__).parent.glob("*.py"))[:12]]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=500, special_tokens=["<eos>"], show_progress=False)
    tokens = [{"input_ids": torch.tensor(each.ids)} for each in bpe.encode_batch(texts)]
    memfeed.cache(tokens, folder / "text.mf", progress=False)


def inputs(batch):  # attention and labels stay inside each document
    documents = batch.pop("document_ids")
    mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()  # [k, 1, BLOCK, BLOCK]
    labels = batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)  # no document predicts the next one
    return {**batch, "attention_mask": mask, "labels": labels}


def train(saved: Path, kill_at: int = -1) -> list[float]:
    torch.manual_seed(0)
    model, losses = LlamaForCausalLM(LlamaConfig(vocab_size=500, **SIZES)), []
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    blocks = memfeed.open(saved.parent / "text.mf").packed("input_ids", BLOCK, eos=0)
    loader = memfeed.Loader(blocks, BATCH_SIZE, shuffle=True, seed=1, drop_last=True, transform=inputs)
    if saved.exists():
        weights, position, losses = torch.load(saved)
        model.load_state_dict(weights), loader.load_state_dict(position)
    while len(losses) < EPOCHS * len(loader):
        for batch in loader:
            (loss := model(**batch).loss).backward()
            optimizer.step(), model.zero_grad(), losses.append(loss.item())
            torch.save([model.state_dict(), loader.state_dict(), losses], saved)
            if len(losses) == kill_at:
                os._exit(9)
    return losses


if __name__ == "__main__" and len(sys.argv) > 1:
    train(Path(sys.argv[1]), KILLED_AT)
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        prepare(folder := Path(name))
        subprocess.run([sys.executable, __file__, folder / "killed.pt"], check=False)
        whole, resumed = train(folder / "whole.pt"), train(folder / "killed.pt")
    assert torch.allclose(torch.tensor(whole), torch.tensor(resumed)), "the resumed run had other batches"
