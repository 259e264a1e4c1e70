"""A row of each reasoning set that `tpu_kit/data/rows/columns.py` has rules for, in the hub's form."""
# ruff: noqa: E501 (a line per row)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TRACE = "Okay, so two and three. That makes five."
THOUGHT = (
    f"<|begin_of_thought|>\n\n{TRACE}\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\nIt is 5.\n\n<|end_of_solution|>"
)
CHOICES = {"label": ["A", "B", "C"], "text": ["bank", "library", "mall"]}
OPTIONS = "A) bank\nB) library\nC) mall"


@dataclass(frozen=True)
class Known:
    """A data set of the hub: a row as it is stored there, and its expected conversion."""

    name: str
    row: dict[str, Any]
    roles: str  # role=column, as `Layout` prints them
    question: str
    reasoning: str
    answer: str
    system: str | None = None


SETS = [
    Known("openai/gsm8k", {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\nSo five.\n#### 5"},
          "cot (question=question, answer=answer)", "What is 2 + 3?", "2 + 3 = <<2+3=5>>5\nSo five.", "5"),
    Known("hendrycks/competition_math",
          {"problem": "What is 2 + 3?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{10}{2}}$."},
          "cot (question=problem, answer=solution), not used: level, type",
          "What is 2 + 3?", r"It is $\boxed{\frac{10}{2}}$.", r"\frac{10}{2}"),
    Known("HuggingFaceH4/MATH-500",
          {"problem": "What is 2 + 3?", "solution": r"It is $\boxed{5}$.", "answer": "5", "subject": "Algebra", "level": 1,
           "unique_id": "test/algebra/1.json"},
          "cot (question=problem, reasoning=solution, answer=answer), not used: subject, level, unique_id",
          "What is 2 + 3?", r"It is $\boxed{5}$.", "5"),
    Known("meta-math/MetaMathQA",
          {"type": "GSM_Rephrased", "query": "What is 2 + 3?", "original_question": "Add 2 and 3.",
           "response": "Two and three make five.\n#### 5\nThe answer is: 5"},
          "cot (question=query, answer=response), not used: type, original_question",
          "What is 2 + 3?", "Two and three make five.", "5"),
    Known("TIGER-Lab/MathInstruct",
          {"source": "data/CoT/aqua_rat.json", "output": "Two and three make five.", "instruction": "What is 2 + 3?"},
          "cot (question=instruction, answer=output), not used: source", "What is 2 + 3?", "", "Two and three make five."),
    Known("microsoft/orca-math-word-problems-200k", {"question": "What is 2 + 3?", "answer": "Two and three make five."},
          "cot (question=question, answer=answer)", "What is 2 + 3?", "", "Two and three make five."),
    Known("AI-MO/NuminaMath-CoT",
          {"source": "synthetic_math", "problem": "What is 2 + 3?", "solution": r"It is $\boxed{5}$.",
           "messages": [{"content": "What is 2 + 3?", "role": "user"}, {"content": r"It is $\boxed{5}$.", "role": "assistant"}]},
          "messages (messages=messages), not used: source, problem, solution",
          "What is 2 + 3?", "", r"It is $\boxed{5}$."),
    Known("AI-MO/NuminaMath-1.5",
          {"problem": "What is 2 + 3?", "solution": "Count on from two.", "answer": "5", "problem_type": "Algebra",
           "question_type": "math-word-problem", "problem_is_valid": "Yes", "solution_is_valid": "Yes", "source": "olympiads",
           "synthetic": False},
          "cot (question=problem, reasoning=solution, answer=answer), not used: problem_type, question_type, "
          "problem_is_valid, solution_is_valid, source, synthetic",
          "What is 2 + 3?", "Count on from two.", "5"),
    Known("nvidia/OpenMathInstruct-1",
          {"question": "What is 2 + 3?", "expected_answer": "5", "predicted_answer": "5", "error_message": "<not_executed>",
           "is_correct": True, "generation_type": "without_reference_solution", "dataset": "gsm8k",
           "generated_solution": "Let us add.\n<llm-code>\nprint(2 + 3)\n</llm-code>"},
          "cot (question=question, reasoning=generated_solution, answer=expected_answer), not used: predicted_answer, "
          "error_message, is_correct, generation_type, dataset",
          "What is 2 + 3?", "Let us add.\n<llm-code>\nprint(2 + 3)\n</llm-code>", "5"),
    Known("nvidia/OpenMathInstruct-2",
          {"problem": "What is 2 + 3?", "generated_solution": r"It is $\boxed{5}$.", "expected_answer": "5",
           "problem_source": "augmented_math"},
          "cot (question=problem, reasoning=generated_solution, answer=expected_answer), not used: problem_source",
          "What is 2 + 3?", r"It is $\boxed{5}$.", "5"),
    Known("nvidia/OpenMathReasoning",
          {"expected_answer": "5", "problem_type": "has_answer_extracted", "problem_source": "aops_c6", "problem": "2 + 3?",
           "generation_model": "DeepSeek-R1", "pass_rate_72b_tir": "0.5", "inference_mode": "cot",
           "generated_solution": f"<think>\n{TRACE}\n</think>It is \\boxed{{5}}."},
          "cot (question=problem, reasoning=generated_solution, answer=expected_answer), not used: problem_type, problem_source, "
          "generation_model, pass_rate_72b_tir, inference_mode", "2 + 3?", TRACE, "5"),
    Known("open-r1/OpenR1-Math-220k",
          {"problem": "2 + 3?", "solution": "Count on.", "answer": "5", "problem_type": "Algebra", "question_type": "MCQ",
           "source": "olympiads", "uuid": "0a", "is_reasoning_complete": [True], "generations": [f"<think>\n{TRACE}\n</think>\n5"],
           "correctness_math_verify": [True], "correctness_llama": None, "finish_reasons": None, "correctness_count": 1,
           "messages": [{"content": "2 + 3?", "role": "user"}, {"content": f"<think>\n{TRACE}\n</think>\nIt is 5.", "role": "assistant"}]},
          "messages (messages=messages), not used: problem, solution, answer, problem_type, question_type, source, uuid, "
          "is_reasoning_complete, generations, correctness_math_verify, correctness_llama, finish_reasons, correctness_count",
          "2 + 3?", TRACE, "It is 5."),
    Known("open-thoughts/OpenThoughts-114k",
          {"system": "Your role is Thought and Solution: <|begin_of_thought|> {thought} <|end_of_thought|>",
           "conversations": [{"from": "user", "value": "2 + 3?"}, {"from": "assistant", "value": THOUGHT}]},
          "messages (system=system, messages=conversations)", "2 + 3?", TRACE, "It is 5.",
          system="Your role is Thought and Solution: <think> {thought} </think>"),
    Known("GAIR/LIMO", {"question": "2 + 3?", "solution": TRACE, "answer": "5"},
          "cot (question=question, reasoning=solution, answer=answer)", "2 + 3?", TRACE, "5"),
    Known("tau/commonsense_qa",
          {"id": "1", "question": "Where is money?", "question_concept": "money", "choices": CHOICES, "answerKey": "A"},
          "cot (question=question, options=choices, answer=answerKey), not used: id, question_concept",
          f"Where is money?\n\n{OPTIONS}", "", "A"),
    Known("allenai/ai2_arc",
          {"id": "1", "question": "Where is money?", "answerKey": "1",
           "choices": {"text": ["bank", "mall"], "label": ["1", "2"]}},
          "cot (question=question, options=choices, answer=answerKey), not used: id", "Where is money?\n\n1) bank\n2) mall", "", "1"),
    Known("derek-thomas/ScienceQA",
          {"image": None, "question": "Where is money?", "choices": ["bank", "mall"], "answer": 1, "hint": "It is a game.",
           "task": "closed choice", "grade": "grade2", "subject": "social", "topic": "money", "category": "x", "skill": "y",
           "lecture": "", "solution": "In this game it is the mall."},
          "cot (question=question, options=choices, reasoning=solution, answer=answer), not used: image, hint, task, "
          "grade, subject, topic, category, skill, lecture",
          "Where is money?\n\nA) bank\nB) mall", "In this game it is the mall.", "B"),
    Known("FreedomIntelligence/medical-o1-reasoning-SFT", {"Question": "2 + 3?", "Complex_CoT": TRACE, "Response": "It is 5."},
          "cot (question=Question, reasoning=Complex_CoT, answer=Response)", "2 + 3?", TRACE, "It is 5."),
    Known("bespokelabs/Bespoke-Stratos-17k",
          {"system": "Think.", "conversations": [{"from": "user", "value": "2 + 3?"}, {"from": "assistant", "value": THOUGHT}]},
          "messages (system=system, messages=conversations)", "2 + 3?", TRACE, "It is 5.", system="Think."),
    Known("glaiveai/reasoning-v1-20m", {"prompt": "2 + 3?", "response": f"<think>\n{TRACE}\n</think>\n\nIt is 5."},
          "cot (question=prompt, answer=response)", "2 + 3?", TRACE, "It is 5."),
    Known("Magpie-Align/Magpie-Reasoning-V2-250K-CoT-Deepseek-R1-Llama-70B",
          {"conversation_id": "1", "instruction": "2 + 3?", "response": f"<think>\n{TRACE}\n</think>\n\nIt is 5.", "difficulty": "easy",
           "conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": f"<think>\n{TRACE}\n</think>\n\nIt is 5."}]},
          "messages (messages=conversations), not used: conversation_id, instruction, response, difficulty",
          "2 + 3?", TRACE, "It is 5."),
    Known("garage-bAInd/Open-Platypus",
          {"input": "", "output": "It is 5.", "instruction": "2 + 3?", "data_source": "MATH/PRM-800K"},
          "cot (question=instruction, answer=output), not used: input, data_source", "2 + 3?", "", "It is 5."),
    Known("databricks/databricks-dolly-15k",
          {"instruction": "Add them.", "context": "2, 3", "response": "It is 5.", "category": "closed_qa"},
          "cot (question=instruction, context=context, answer=response), not used: category", "Add them.\n\n2, 3", "", "It is 5."),
]  # fmt: skip
