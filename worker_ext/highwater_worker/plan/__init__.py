"""vLLM asked on the `meta` device: what it will say to a command line, without a device, weights or a network.

`python -m highwater_worker.plan -- vllm serve MODEL ...` runs where vLLM can be imported. vLLM's own parser, model
runner and pool functions answer; a card is pretended, and no tensor holds anything. It refuses to guess: where this
vLLM cannot be asked, the answer is why. Nothing else imports this package, which imports torch and vLLM only when it
answers, and nothing else of ours.
"""
