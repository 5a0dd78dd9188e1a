"""longtail inside vLLM, as a plugin: a drafter that vLLM learns, and coupled drafts of any drafter.

vLLM loads `plugin.register` in each of its processes (entry point group vllm.general_plugins). It
changes nothing unless an engine asks for it, by `additional_config={"longtail": {}}` or by the
environment variable LONGTAIL_VLLM=learned or =coupled.

    guards      settings, strictly parsed; what cannot be coupled; checks of signatures
    plugin      entry point, hooks in the front end and in the workers, status
    v1, v2      the functions that are replaced in each of vLLM's model runners; cpu_fixes on a CPU
    learned     the learned drafter: `ridge` block and `history`, in each runner
    depths      how deep vLLM drafts, by measurement in its scheduler; gains: what that saved
    generator   the engine of `longtail train`, and `reload`, its new weights
"""
