"""How much of a slow corrector's latency hides behind the policy's own work?

    python examples/benchmarks/corrector_latency.py --step 1 --latency 1

The real collector and the real OpenAI corrector play Points24 against a server of our own in another process. The
policy is scripted: every vector step takes `--step` seconds. Played without a corrector, with a server that answers
at once and with one that takes `--latency` seconds, in turn; of `--repeats` rollouts the fastest counts, so that other
work on the machine matters less.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import re
import time
from typing import Any

import numpy as np

from trl_gtr import Engine, OpenAICorrector, RolloutCollector, make_task
from trl_gtr.types import Generation

TEXT = '{"cards": ["4", "9", "A", "K"], "formula": "", "thoughts": "I aim at 4+9+1+10=24, next is 4.", "action": "4"}'
ANSWER = {
    "cards_read": "no",
    "formula_right": "no",
    "action_leads_there": "no",
    "possible_solution": "NO",
    "target_formula": None,
    "evaluation": "NO",
    "correction": None,
    "right_action": None,
}


def serve(latency: float, port: Any) -> None:
    """A chat-completions server that gives the same answer to everybody, `latency` seconds after the question."""
    message = {"role": "assistant", "content": json.dumps(ANSWER)}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
    reply = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client has hung up
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                await reader.readexactly(int(length[1]) if length else 0)
                await asyncio.sleep(latency)
                writer.write(reply)
                await writer.drain()

    async def main() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def seconds_for_a_rollout(args: argparse.Namespace, latency: float | None) -> float:
    if latency is None:
        return play(args, None)
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    server = context.Process(target=serve, args=(latency, port), daemon=True)
    server.start()
    corrector = OpenAICorrector(
        "scripted", base_url=f"http://127.0.0.1:{port.get()}/v1", api_key="none", concurrency=args.concurrency
    )
    seconds = play(args, corrector)
    corrector.close()
    server.terminate()
    return seconds


def play(args: argparse.Namespace, corrector: OpenAICorrector | None) -> float:
    count = iter(range(10**9))

    class ScriptedEngine(Engine):
        def generate(self, prompts, images, greedy=False):  # type: ignore[no-untyped-def]
            time.sleep(args.step)
            ids = np.zeros(1, np.int64)
            # Every thought is another one: identical requests in flight would be sent only once.
            return [Generation(ids, TEXT.replace("next", f"number {next(count)}, next")) for _ in prompts]

    collector = RolloutCollector(make_task("points24"), corrector, num_envs=args.envs, seed=0)
    started = time.perf_counter()
    rollout = collector.collect(ScriptedEngine(), args.steps)
    seconds = time.perf_counter() - started
    answered = [correction for correction in rollout.corrections if correction and correction.verdict == "unsolvable"]
    assert corrector is None or len(answered) == args.envs * args.steps, rollout.corrections
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", type=float, default=0.2, help="seconds of the scripted policy for one vector step")
    parser.add_argument("--latency", type=float, default=0.2, help="seconds of the server for one answer")
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    runs = [
        [seconds_for_a_rollout(args, latency) for latency in (None, 0.0, args.latency)] for _ in range(args.repeats)
    ]
    alone, without, with_latency = np.min(runs, axis=0)
    total = args.steps * args.latency
    print(f"{args.envs} environments x {args.steps} steps of {args.step:g} s, server latency {args.latency:g} s")
    print(f"no corrector {alone:.2f} s, no latency {without:.2f} s, with latency {with_latency:.2f} s")
    print(f"with latency / without: {with_latency / without:.3f}, / no corrector: {with_latency / alone:.3f}")
    print(f"hidden share of the latency of {args.steps} vector steps: {1 - (with_latency - without) / total:.1%}")
