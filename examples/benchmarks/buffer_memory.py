"""How much memory the correction buffer takes when every step of a run is corrected.

    python examples/benchmarks/buffer_memory.py --task points24 --steps 15000

An agent that follows the expert most of the time plays `--steps` steps; each of them goes into the buffer with its own
image and prompt and the expert's response, one id per character (real tokenizers need fewer). Printed: the memory that
the buffer holds, as `tracemalloc` sees it; the share of images that are distinct; and what adding and drawing cost.
"""

import argparse
import time
import tracemalloc

import numpy as np

from trl_gtr import make_task
from trl_gtr.guides.buffer import CorrectionBuffer


def corrections(task, num_steps, seed, expert_share=0.8):
    """Yields `num_steps` times image, prompt, target ids and the number of labels."""
    rng = np.random.default_rng(seed)
    env = task.make_env()
    observation, info = env.reset(seed=seed)
    for _ in range(num_steps):
        expert = task.expert(info)
        legal = task.legal_actions(info)
        random_action = legal[rng.integers(len(legal))]
        text = expert.text if expert else random_action  # no solution: there is nothing to teach but the buffer's size
        num_labels = expert.action_span[0] if expert else len(text)
        yield observation, task.prompt(observation, info), [ord(char) for char in text], num_labels

        if expert and rng.random() < expert_share:
            action = task.to_env_action(expert, info)
        else:
            action = int(rng.integers(env.action_space.n))
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            observation, info = env.reset()


def measure_memory(task, num_steps, seed):
    """Bytes that become free when the buffer goes, bytes of all images as arrays, and the buffer's own account."""
    tracemalloc.start()
    buffer = CorrectionBuffer(capacity=num_steps, seed=seed)
    raw_bytes = 0
    for observation, prompt, target_ids, num_labels in corrections(task, num_steps, seed):
        buffer.add(prompt, observation, target_ids, num_labels)
        raw_bytes += observation.nbytes
    num_images, image_bytes = buffer.num_images, buffer.image_bytes
    with_buffer, _ = tracemalloc.get_traced_memory()
    del buffer
    without_buffer, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return with_buffer - without_buffer, raw_bytes, num_images, image_bytes


def measure_times(task, num_steps, seed):
    """CPU milliseconds per added and per drawn sample, without the tracer's overhead."""
    played = list(corrections(task, num_steps, seed))
    buffer = CorrectionBuffer(capacity=num_steps, seed=seed)
    start = time.process_time()
    for observation, prompt, target_ids, num_labels in played:
        buffer.add(prompt, observation, target_ids, num_labels)
    added = time.process_time()
    for _ in range(10):
        buffer.sample(64)
    drawn = time.process_time()
    return (added - start) / num_steps * 1000, (drawn - added) / 640 * 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="points24")
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    task = make_task(args.task)

    held, raw_bytes, num_images, image_bytes = measure_memory(task, args.steps, args.seed)
    add_ms, sample_ms = measure_times(task, min(args.steps, 500), args.seed)
    print(f"{args.task}: {args.steps} corrected steps")
    print(f"buffer           {held / 1e6:8.1f} MB, of which images {image_bytes / 1e6:.1f} MB")
    print(f"raw images       {raw_bytes / 1e6:8.1f} MB as uint8, {4 * raw_bytes / 1e6:.1f} MB as float32")
    print(f"distinct images  {num_images / args.steps:8.1%}")
    print(f"a distinct image {image_bytes / num_images / 1e3:8.1f} kB")
    print(f"adding           {add_ms:8.2f} ms of CPU a sample")
    print(f"drawing          {sample_ms:8.2f} ms of CPU a sample")


if __name__ == "__main__":
    main()
