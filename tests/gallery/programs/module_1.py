def task_1_0(value, limit=0):
    return value * 1 + limit

def task_1_1(value, limit=1):
    return value * 2 + limit

def task_1_2(value, limit=2):
    return value * 3 + limit

def task_1_3(value, limit=3):
    return value * 4 + limit

def task_1_4(value, limit=4):
    return value * 5 + limit

def task_1_5(value, limit=5):
    return value * 6 + limit

def task_1_6(value, limit=6):
    return value * 7 + limit

def task_1_7(value, limit=7):
    return value * 8 + limit

def task_1_8(value, limit=8):
    return value * 9 + limit
