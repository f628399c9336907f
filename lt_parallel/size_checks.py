"""What is wrong with a number, in words. Pure Python."""

from collections.abc import Sequence


def require_positive_int(name: str, value: object) -> int:
    """Return `value` if it is an integer of at least 1.

    Args:
        name: What the user calls it, for the error.
        value: The value; True and False are not integers here.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


def require_pipeline_for_chunks(pipeline_model_parallel_size: int, num_model_chunks: int) -> None:
    """Raise ValueError for several model chunks per rank without a pipeline to interleave them in."""
    if num_model_chunks > 1 and pipeline_model_parallel_size == 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={num_model_chunks} needs "
            "pipeline_model_parallel_size > 1, got 1; nearest valid: pipeline_model_parallel_size=2, "
            "or no virtual_pipeline_model_parallel_size"
        )


def require_divisible(name: str, value: int, divisor_name: str, divisor: int) -> int:
    """Return `value // divisor` if that leaves no remainder.

    Args:
        name: What the user calls the value.
        value: The value.
        divisor_name: What the user calls the divisor. A product is written with its values, such as
            `"2 x context_parallel_size=4"` for a divisor of 8.
        divisor: The divisor.

    Raises:
        ValueError: There is a remainder; the message names the nearest multiples.
    """
    if value % divisor == 0:
        return value // divisor
    shown = f"{divisor_name} (= {divisor})" if "=" in divisor_name else f"{divisor_name}={divisor}"
    nearest = either(nearest_multiples(value, divisor))
    raise ValueError(f"{name}={value} must be divisible by {shown}; nearest valid: {nearest}")


def nearest_multiples(value: int, divisor: int) -> list[int]:
    """The multiples of `divisor` next to `value`, positive ones only."""
    below = value // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple > 0]


def either(values: Sequence[int]) -> str:
    """The values as a choice, "2 or 4"."""
    return " or ".join(map(str, values))
